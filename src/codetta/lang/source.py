"""Programs as text: ``program_text`` writes valid source of the language, ``parse_program`` traces it back."""

from __future__ import annotations

import ast
import keyword
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from codetta.core.node import Node
from codetta.core.types import DTYPES
from codetta.errors import CodettaError, SourceLine, UnsupportedError
from codetta.ir import ops
from codetta.ir.program import Program, Role, param_name
from codetta.ir.split import Split
from codetta.lang import record
from codetta.lang.annotations import KINDS
from codetta.lang.body import program_of
from codetta.lang.expression import ATOM, Text, expression, size_text, split_call, type_text
from codetta.lang.functions import LANGUAGE
from codetta.lang.signature import gemm_of

WIDTH = 100
MAX_UNPACKED = 4  # parts of one split that are worth a name each, used or not
ROLES: tuple[Role, ...] = ("epilogue", "finalize", "leftover")
NAMES: dict[str, object] = {
    **LANGUAGE,
    **DTYPES,
    **{c.__name__: c for c in KINDS.values()},
    "inf": float("inf"),
    "nan": float("nan"),
}
TAKEN = {*NAMES, *ROLES, "dict", "_"}
FILE = "<program>"


# --- writing ----------------------------------------------------------------------------------------------------------


def program_text(program: Program) -> str:
    """The source of a program in the language: tracing it gives the same program back."""
    function = _Names(set(TAKEN)).take(program.name)
    names = _Names(set(TAKEN))
    variables = {p: names.take(param_name(p)) for p in program.params}
    writer = _Writer(program, names, variables)
    lines = [_decorator(program, function), *_signature(program, function, variables), *writer.body()]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Names:
    """The Python names in use."""

    taken: set[str]
    count: int = 0

    def take(self, wanted: str) -> str:
        """``wanted``, or something like it that is a free Python name."""
        name = re.sub(r"\W", "_", wanted, flags=re.ASCII) or "_"
        name = f"_{name}" if name[0].isdigit() else name
        while name in self.taken or not _is_name(name):
            name += "_"
        self.taken.add(name)
        return name

    def fresh(self) -> str:
        """The next short name."""
        self.count += 1
        return f"t{self.count}" if f"t{self.count}" not in self.taken else self.fresh()


def _decorator(program: Program, function: str) -> str:
    options = [] if function == program.name else [f"name={_quoted(program.name)}"]
    if program.gemm is not None:
        gemm = program.gemm
        options += [f"gemm={_quoted(gemm.form)}", f"k={size_text(gemm.k)}", f"dtype={gemm.dtype}"]
    return f"@{program.role}({', '.join(options)})" if options else f"@{program.role}"


def _signature(program: Program, function: str, variables: dict[Node, str]) -> list[str]:
    params = [f"{variables[p]}: {_annotation(p, variables[p])}" for p in program.params]
    return _call(f"def {function}", params, ":", indent="")


def _annotation(p: Node, variable: str) -> str:
    text, name = type_text(p.type), param_name(p)
    return text if name == variable else f"{text}.named({_quoted(name)})"


def _call(start: str, items: list[str], end: str, indent: str) -> list[str]:
    """One line if it fits, else one line an item."""
    line = f"{indent}{start}({', '.join(items)}){end}"
    if len(line) <= WIDTH or not items:
        return [line]
    return [f"{indent}{start}(", *(f"{indent}    {item}," for item in items), f"{indent}){end}"]


def _quoted(text: str) -> str:
    return f'"{text}"' if repr(text) == f"'{text}'" and '"' not in text else repr(text)


def _is_name(text: str) -> bool:
    """Whether Python reads the text as one identifier, unchanged."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text) and text != "__debug__"


class _Writer:
    """The body of one program, statement by statement."""

    def __init__(self, program: Program, names: _Names, variables: dict[Node, str]) -> None:
        self.program, self.names = program, names
        self.known: dict[Node, Text] = {n: Text(v, ATOM) for n, v in variables.items()}
        self.lines: list[str] = []
        self.order = program.body
        self.uses: dict[Node, int] = {}
        for n in [*(a for m in self.order for a in m.args), *(n for _, n in program.outputs)]:
            self.uses[n] = self.uses.get(n, 0) + 1
        self.output_names: dict[Node, str] = {}
        for name, n in program.outputs:
            self.output_names.setdefault(n, name)

    def body(self) -> list[str]:
        """Assignments, then the return."""
        for n in self.order:
            if n in self.known:
                continue
            if n.op is ops.PART and isinstance(split := n.attrs[0], Split) and self.take_apart(n, split):
                continue
            self.known[n] = self.fitting(n)
            if self.uses[n] > 1 and n.op is not ops.CONST:
                self.assign(n)
        return [*self.lines, *self.outputs()]

    def fitting(self, n: Node) -> Text:
        """The expression of ``n``, short enough for a line: long arguments get names."""
        text = expression(n, self.known.__getitem__)
        while len(text.text) > WIDTH - 20:
            inlined = [a for a in n.args if not self.known[a].text.isidentifier() and a.op is not ops.CONST]
            if not inlined:
                break
            self.assign(max(inlined, key=lambda a: len(self.known[a].text)))
            text = expression(n, self.known.__getitem__)
        return text

    def assign(self, n: Node) -> None:
        """A statement that gives ``n`` a name."""
        name = self.name(n)
        self.lines.append(f"    {name} = {self.known[n]}")
        self.known[n] = Text(name, ATOM)

    def take_apart(self, n: Node, split: Split) -> bool:
        """Whether a statement names the parts of the split of which ``n`` is one: a name each, or one if many."""
        parts = {p.attrs[1]: p for p in self.order if p.op is ops.PART and (p.args, p.attrs[0]) == (n.args, split)}
        call = split_call(n, self.known[n.args[0]])
        if 1 < split.parts <= MAX_UNPACKED:
            names = [self.name(parts[i]) if i in parts else "_" for i in range(split.parts)]
            self.lines.append(f"    {', '.join(names)} = {call}")
            self.known.update({p: Text(names[i], ATOM) for i, p in parts.items() if isinstance(i, int)})
        elif len(parts) > 1:
            name = self.names.take(self.names.fresh())
            self.lines.append(f"    {name} = {call}")
            self.known.update({p: Text(f"{name}[{i}]", ATOM) for i, p in parts.items()})
        return n in self.known

    def name(self, n: Node) -> str:
        """The output's name where it is free, else the next short one."""
        wanted = self.output_names.get(n)
        if wanted is not None and _is_name(wanted) and wanted not in self.names.taken:
            return self.names.take(wanted)
        return self.names.take(self.names.fresh())

    def outputs(self) -> list[str]:
        """The return statement."""
        values = [(name, self.returned(n)) for name, n in self.program.outputs]
        if all(_is_name(name) for name, _ in values):
            return _call("return dict", [f"{name}={value}" for name, value in values], "", indent="    ")
        return ["    return {", *(f"        {_quoted(name)}: {value}," for name, value in values), "    }"]

    def returned(self, n: Node) -> str:
        """An output's text; a bare number would not be a traced value."""
        return f"const({self.known[n]})" if n.op is ops.CONST else str(self.known[n])


# --- reading ----------------------------------------------------------------------------------------------------------


def parse_program(text: str) -> Program:
    """The Program that the text describes: one decorated function, with the names of the language and no others.

    The text is executed; it is source code, to be trusted like any other."""
    lines = text.splitlines(keepends=True)
    linecache.cache[FILE] = (len(text), None, lines, FILE)  # so that errors can show the line
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        line = SourceLine(FILE, e.lineno or 1, (e.text or "").strip())
        raise UnsupportedError(f"the text is no Python: {e.msg}", where=line) from e
    match tree.body:
        case [ast.FunctionDef()]:
            pass
        case _:
            hint = "the names of the language are there already; imports and other statements are not needed"
            raise UnsupportedError("a program's text holds exactly one function, decorated with its role", hint=hint)
    return _execute(text)


def _execute(text: str) -> Program:
    found: list[Program] = []
    namespace: dict[str, Any] = {**NAMES, "__builtins__": {"dict": dict}, "__name__": FILE}
    namespace.update({role: _collector(role, namespace, found) for role in ROLES})
    try:
        exec(compile(text, FILE, "exec"), namespace)
    except CodettaError:
        raise
    except Exception as e:
        where = record.line_of_error(e.__traceback__)
        raise UnsupportedError(f"the text cannot be traced: {e}", where=where) from e
    if len(found) != 1:
        raise UnsupportedError(f"the function needs one role: decorate it with one of {', '.join(ROLES)}")
    return found[0]


def _collector(role: Role, scope: dict[str, Any], found: list[Program]) -> Callable[..., Any]:
    """The decorator of a role inside a text: it keeps the program."""

    def decorator(fn: Callable[..., Any] | None = None, /, *, name: str | None = None, **gemm: Any) -> Any:
        def collect(f: Callable[..., Any]) -> None:
            found.append(program_of(f, role, f.__name__ if name is None else name, gemm_of(**gemm), scope))

        return collect if fn is None else collect(fn)

    return decorator
