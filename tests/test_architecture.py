"""The house rules that a machine can check: who may import whom, how long things may be, where side doors are."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "codetta"

# Data flows down this list; a file imports only from its own room and from rooms above it. Rooms on one line are
# neighbours, which do not import each other.
ROOMS = (
    ("errors",),
    ("settings",),
    ("core", "timing"),
    ("ir",),
    ("lang",),
    ("autodiff", "rules"),
    ("partition",),
    ("backends",),
    ("runtime",),
    ("nn",),
    ("capture",),
    ("testing",),
    ("audit",),
    ("bench",),
    ("author",),
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

# Files that load a module of codetta inside a function, each with its reason.
LATE_IMPORTS = {
    "__init__.py": "the table of public names",
    "backends/__init__.py": "the backend getter: kernels are loaded when a device asks for them",
    "bench/contenders.py": "Liger, a peer that few have",
    "bench/loss.py": "Liger and QuACK, peers that few have",
    "bench/peers.py": "Liger, FlashInfer and QuACK, peers that few have",
    "capture/inductor.py": "Inductor, which takes seconds to load",
    "capture/trainer.py": "accelerate, which only a Trainer needs",
    "cli/__init__.py": "a command is loaded when it is called",
    "lang/trace.py": "vjp() and run() of an epilogue: the work lies in runtime, the author's handle here",
}
LATE_ROOM = "runtime"  # the one room that a late import may reach to the right for
# Packages that a user may not have. They are imported inside functions of these rooms only; the kernels' package,
# which is loaded late as a whole, imports its own at the top.
OPTIONAL = {
    "accelerate",
    "cutlass",
    "flash_attn",
    "liger_kernel",
    "matplotlib",
    "quack",
    "torchtitan",
    "transformers",
    "triton",
    "tvm_ffi",
}
LATE_OPTIONAL = {"audit", "bench", "cli"}
KERNELS = "backends/hopper/"
# QuACK and CuTe DSL take their target and their cache from the environment alone: it is set for them here.
TOOLCHAIN = ("backends/hopper/toolchain.py",)


@dataclass(frozen=True)
class Module:
    """One source file: its path below the package, its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.split("/", 1)[0].removesuffix(".py")


@dataclass(frozen=True)
class Import:
    """``name`` imported at ``line``; ``late`` if inside a function."""

    name: str
    line: int
    late: bool


def modules() -> list[Module]:
    return [
        Module(file.relative_to(SRC).as_posix(), text, ast.parse(text))
        for file in sorted(SRC.rglob("*.py"))
        for text in [file.read_text(encoding="utf-8")]
    ]


def every_module(*, but: str | tuple[str, ...] = "") -> pytest.MarkDecorator:
    """Run a test once a module, except the modules whose path starts with ``but``."""
    chosen = [module for module in MODULES if not (but and module.path.startswith(but))]
    return pytest.mark.parametrize("module", chosen, ids=lambda m: m.path)


MODULES = modules()
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FRONT_DOOR = "__"  # __init__ and __main__ of the package itself: they may see every room


def imports(node: ast.AST, *, late: bool = False) -> Iterator[Import]:
    """Every import statement below ``node``, and every call that imports by name (``?`` if the name is computed)."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, child.lineno, late)
            case ast.ImportFrom(module=source, names=names):
                # `from codetta import core` names a room too.
                for alias in names:
                    yield Import(f"{source}.{alias.name}" if source == "codetta" else str(source), child.lineno, late)
            case ast.Call(func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module")):
                match child.args:
                    case [ast.Constant(value=str(name)), *_]:
                        yield Import(name, child.lineno, late)
                    case _:
                        yield Import("?", child.lineno, late)
        yield from imports(child, late=late or isinstance(child, (*FUNCTIONS, ast.Lambda)))


def calls(module: Module, name: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_every_room_is_on_the_map():
    unknown = {module.room for module in MODULES} - RANK.keys() - {"__init__", "__main__"}
    assert not unknown, f"give these a place in ROOMS: {sorted(unknown)}"


@every_module(but=FRONT_DOOR)
def test_imports_point_up_the_list(module: Module):
    wrong = []
    for found in imports(module.tree):
        package, _, rest = found.name.partition(".")
        if package != "codetta":
            continue
        room = rest.partition(".")[0]
        if module.path in LATE_IMPORTS and room == LATE_ROOM:
            continue
        if room != module.room and RANK.get(room, -1) >= RANK[module.room]:
            wrong.append(f"{module.path}:{found.line} imports codetta.{room}")
    assert not wrong


@every_module()
def test_no_import_inside_a_function(module: Module):
    wrong = []
    for found in imports(module.tree):
        package = found.name.partition(".")[0]
        optional = package in OPTIONAL and module.room in LATE_OPTIONAL
        if found.late and not optional and module.path not in LATE_IMPORTS:
            wrong.append(f"{module.path}:{found.line} imports {found.name}")
    assert not wrong


@every_module(but=KERNELS)
def test_optional_packages_are_not_imported_at_the_top(module: Module):
    wrong = [
        f"{module.path}:{found.line} imports {found.name}"
        for found in imports(module.tree)
        if not found.late and found.name.partition(".")[0] in OPTIONAL
    ]
    assert not wrong


@every_module()
def test_sizes(module: Module):
    assert len(module.text.splitlines()) <= MAX_FILE_LINES
    long = [
        f"{module.path}:{node.lineno} {node.name}: {lines(node)} lines"
        for node in ast.walk(module.tree)
        if isinstance(node, FUNCTIONS) and lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long


@every_module()
def test_says_what_it_is(module: Module):
    assert ast.get_docstring(module.tree), f"{module.path} has no docstring"
    assert not VAGUE_NAMES & set(module.path.removesuffix(".py").split("/"))


@every_module()
def test_raises_and_never_asserts(module: Module):
    assert not [node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.Assert)]


@every_module()
def test_prints_only_from_the_command_line(module: Module):
    assert module.room == "cli" or not calls(module, "print")


@every_module(but=("settings.py", *TOOLCHAIN))
def test_reads_the_environment_only_in_settings(module: Module):
    reads = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"}
    ]
    assert not reads
    assert "environ" not in {alias.name for alias in names_imported_from(module, "os")}


def names_imported_from(module: Module, source: str) -> list[ast.alias]:
    return [
        alias
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.module == source
        for alias in node.names
    ]


def test_the_rules_see_what_they_forbid():
    source = (
        "import os\n"
        "def f():\n"
        "    from codetta import cli\n"
        "    __import__('quack.gemm')\n"
        "    g = lambda: import_module(x)\n"
    )
    found = list(imports(ast.parse(source)))
    assert [(i.name, i.late) for i in found] == [
        ("os", False),
        ("codetta.cli", True),
        ("quack.gemm", True),
        ("?", True),
    ]
