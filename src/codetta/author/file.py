"""An epilogue file: its programs, each with its plain-PyTorch reference, its sizes and its inputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from codetta.errors import AuthorError, SourceLine
from codetta.ir.program import Program, param_name
from codetta.lang.record import line_of_error, source_line
from codetta.lang.signature import definition
from codetta.lang.trace import Epilogue

REFERENCE, SIZES, INPUTS = "_reference", "_SIZES", "_inputs"


@dataclass(frozen=True)
class Authored:
    """A program with what its file says beside it: the reference, the real sizes, the hook that changes inputs."""

    name: str
    file: Path
    epilogue: Epilogue
    reference: Callable[..., Any]
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: Callable[..., Any] | None = None

    @property
    def program(self) -> Program:
        """The traced program."""
        return self.epilogue.program

    @property
    def where(self) -> SourceLine:
        """The line of the program's ``def``."""
        return definition(self.epilogue.fn)


def load(place: str) -> list[Authored]:
    """The programs of ``FILE`` or the one of ``FILE::NAME``; AuthorError where there are none, or a reference is
    missing. An error of the language passes as it is."""
    path, _, name = place.partition("::")
    file = Path(path)
    if not file.is_file():
        raise AuthorError(f"no file {path}", hint="`codetta new NAME` writes one; then `codetta check NAME.py`")
    scope = vars(_module(file))
    programs = {n: e for n, e in scope.items() if isinstance(e, Epilogue) and e.fn.__module__ == scope["__name__"]}
    if not programs:
        raise AuthorError(f"{path} holds no program", hint="decorate a function with @epilogue; `codetta new NAME`")
    if name and name not in programs:
        raise AuthorError(f"{path} holds no program called {name}", hint=f"there are: {', '.join(programs)}")
    return [_authored(file, n, e, scope) for n, e in programs.items() if name in ("", n)]


def _module(file: Path) -> ModuleType:
    """The file, run as a module of its own."""
    name = f"codetta_epilogues_{abs(hash(file.resolve()))}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise AuthorError(f"{file} is no Python file", hint="its name ends with .py")
    module = module_from_spec(spec)
    sys.modules[name] = module  # Dynamo looks a function's module up here
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        broken = SourceLine(str(file), error.lineno or 0, error.text or "")
        raise AuthorError(f"{file} is no Python: {error.msg}", where=broken) from None
    except (ImportError, NameError) as error:
        where = line_of_error(error.__traceback__)
        hint = "everything of the language is imported from codetta: `from codetta import Tile, epilogue, silu`"
        raise AuthorError(f"{file} cannot be run: {error}", where=where, hint=hint) from None
    return module


def _authored(file: Path, name: str, e: Epilogue, scope: Mapping[str, Any]) -> Authored:
    where, params = definition(e.fn), [param_name(p) for p in e.program.params]
    wanted = f"def {name}{REFERENCE}({', '.join(params)}):"
    reference = scope.get(name + REFERENCE)
    if not inspect.isfunction(reference):
        message = f"{name} has no reference to be compared with"
        hint = f"write it in plain PyTorch, with the same names in and out:\n{wanted}\n    return dict(...)"
        raise AuthorError(message, where=where, hint=hint)
    if list(inspect.signature(reference).parameters) != params:
        taken = ", ".join(inspect.signature(reference).parameters)
        code = reference.__code__
        line = source_line(code.co_filename, code.co_firstlineno)
        message = f"{name}{REFERENCE} takes ({taken}), and {name} takes ({', '.join(params)})"
        raise AuthorError(message, where=line, hint=f"write `{wanted}`")
    return Authored(name, file, e, reference, _sizes(name, scope, where), scope.get(name + INPUTS))


def _sizes(name: str, scope: Mapping[str, Any], where: SourceLine) -> Mapping[str, int]:
    given = scope.get(name + SIZES, {})
    right = isinstance(given, Mapping) and all(type(v) is int and v > 0 for v in given.values())
    if not right:
        hint = f'write `{name}{SIZES} = {{"M": 16384, "N": 4096, "K": 4096}}`'
        raise AuthorError(f"{name}{SIZES} is {given!r}, no sizes by name", where=where, hint=hint)
    return dict(given)
