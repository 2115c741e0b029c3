"""docs/authoring/reference.md: every function of the language, made from the op table, each tried in a program."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from codetta.backends.hopper.choose import why_split
from codetta.core.node import Node
from codetta.errors import CodettaError
from codetta.ir import legal
from codetta.ir.program import Program
from codetta.lang.expression import type_text
from codetta.lang.functions import LANGUAGE
from codetta.lang.source import parse_program

HEAD = """# Language reference

Every function of the language, made from the op table by `codetta show language`; a test makes it again and compares.
What a program is, its kinds, dtypes and the block-local rule are in [language.md](../language.md); the
[tutorial](tutorial.md) and the [examples](examples.md) show them at work.

Each function was traced in the call that the table shows, among these parameters:

```text
{params}
```

*Gives* is the type of that call. *In an epilogue*: "at once", or "stored only" where the value is complete only when
all tiles are done: return it, a finalize folds it, and the next program reads it. *One kernel*: whether the call fits a
GEMM's kernel on Hopper; where not, the program runs as a GEMM and a generated kernel behind it, for the reason given.

Operators do the same: `+ - * /`, `//` and `%` on integers, comparisons, `& | ~` on booleans, unary `-`, `abs()`, and
`**` with the exponents 2, -1, 0.5 and -0.5.
"""
PARAMS = {
    "acc": "Tile[512, f32]",
    "x": "Tile[512, bf16]",
    "gain": "RowVec[512, f32]",
    "rstd": "ColVec[f32]",
    "target": "ColVec[i32]",
    "seed": "Scalar[i64]",
    "w": "Tile[64, 512, bf16]",
}
SIMPLE = ("exp", "log", "tanh", "erf", "sqrt", "rsqrt", "recip", "sin", "cos", "sigmoid", "silu", "gelu", "gelu_tanh")
UNARY = ("neg", "abs", *SIMPLE)
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
CHOSEN = "where({}, acc, 0.0)"  # a boolean is no output of a kernel: it chooses one
FAMILIES: dict[str, tuple[str, ...]] = {
    "Arithmetic": (*BINARY, "neg", "abs", "floordiv", "mod"),
    "Functions of one number": SIMPLE,
    "Comparisons and choice": (*COMPARISONS, "logical_and", "logical_or", "logical_not", "where"),
    "Types, indices, random numbers": ("to", "const", "expand", "column_index", "row_index", "random"),
    "Columns in parts": (
        *("halves", "adjacent", "columns", "equal_columns", "join_halves", "join_adjacent", "join_columns", "turn"),
    ),
    "Reductions": (
        *(f"{fn}_{target}" for target in ("row", "col", "inside", "groups", "all") for fn in ("sum", "max", "absmax")),
        *("logsumexp_row", "select_column"),
    ),
    "Rows of weights, which only compiled programs use": ("stack", "take_rows"),
}
# Each function in a call, and where the call alone is no output, what is made of it.
CALLS: dict[str, tuple[str, str]] = {
    **{n: (f"{n}(acc)", "{}") for n in UNARY},
    **{n: (f"{n}(acc, x)", "{}") for n in BINARY},
    **{n: (f"{n}(acc, x)", CHOSEN) for n in COMPARISONS},
    "floordiv": ("floordiv(column_index(acc), 2)", "where({} == target, acc, 0.0)"),
    "mod": ("mod(row_index(acc), 2)", "where({} == 0, acc, 0.0)"),
    "logical_and": ("logical_and(acc > 0.0, x > 0.0)", CHOSEN),
    "logical_or": ("logical_or(acc > 0.0, x > 0.0)", CHOSEN),
    "logical_not": ("logical_not(acc > 0.0)", CHOSEN),
    "where": ("where(acc > x, acc, 0.0)", "{}"),
    "to": ("to(acc, bf16)", "{}"),
    "const": ("const(0.5)", "acc * {}"),
    "expand": ("expand(rstd, acc)", "acc + {}"),
    "column_index": ("column_index(acc)", "where({} == target, acc, 0.0)"),
    "row_index": ("row_index(acc)", "where({} == target, acc, 0.0)"),
    "random": ("random(seed, row_index(acc), column_index(acc))", "where({} >= 0.1, acc, 0.0)"),
    "halves": ("halves(acc)[0]", "to(silu({}) * halves(acc)[1], bf16)"),
    "adjacent": ("adjacent(acc)[0]", "to(join_adjacent({}, adjacent(acc)[1] * 2.0), bf16)"),
    "columns": ("columns(acc, 384, 128)[0]", "{}"),
    "equal_columns": ("equal_columns(acc, 4)[0]", "{}"),
    "join_halves": ("join_halves(halves(acc, groups=4)[1], halves(acc, groups=4)[0], groups=4)", "to({}, bf16)"),
    "join_adjacent": ("join_adjacent(adjacent(acc)[1], adjacent(acc)[0])", "to({}, bf16)"),
    "join_columns": ("join_columns(columns(acc, 384, 128)[0], columns(acc, 384, 128)[1] * 2.0)", "{}"),
    "turn": ("turn(gain)", "{}"),
    **{f"{fn}_{to}": (f"{fn}_{to}(acc)", "{}") for fn in ("sum", "max", "absmax") for to in ("row", "col", "all")},
    **{f"{fn}_inside": (f"{fn}_inside(acc, groups=4)", "acc * {}") for fn in ("sum", "max", "absmax")},
    **{f"{fn}_groups": (f"{fn}_groups(acc, groups=4)", "{}") for fn in ("sum", "max", "absmax")},
    "logsumexp_row": ("logsumexp_row(acc)", "{}"),
    "select_column": ("select_column(acc, target)", "{}"),
    "stack": ("stack(w, w, rows=(64, 64))", "{}"),
    "take_rows": ("take_rows(w, 0, 32)", "{}"),
}


def language_page() -> str:
    """The whole page."""
    head = HEAD.format(params="\n".join(f"{name}: {text}" for name, text in PARAMS.items()))
    return "\n".join([head, *(line for title, names in FAMILIES.items() for line in _family(title, names))])


def signature(name: str, function: Callable[..., Any]) -> str:
    """The function as it is called: ``halves(x, groups=1)``."""
    shown = []
    for p in inspect.signature(function).parameters.values():
        star = "*" if p.kind is p.VAR_POSITIONAL else ""
        shown.append(f"{star}{p.name}" if p.default is p.empty else f"{p.name}={p.default}")
    return f"{name}({', '.join(shown)})"


def _family(title: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| function | meaning | for example | gives | in an epilogue | one kernel |"
    yield "|---|---|---|---|---|---|"
    for name in names:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in _row(name)) + " |"
    yield ""


def _row(name: str) -> tuple[str, ...]:
    tried = _tried(name)
    meaning = (inspect.getdoc(LANGUAGE[name]) or "").replace("``", "`").replace("\n", " ")
    call = CALLS[name][0]
    cells = (f"`{type_text(tried.value.type)}`", tried.place, tried.kernel)
    return (f"`{signature(name, LANGUAGE[name])}`", meaning, f"`{call}`", *cells)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A function in a program: the call's value, where it may stand, and what becomes of it."""

    value: Node
    place: str
    kernel: str


def _tried(name: str) -> _Tried:
    call, use = CALLS[name]
    value = _program(call, "leftover").outputs[0][1]
    place = "stored only" if legal.crosses("epilogue", value) else "at once"
    try:
        program = _program(use.format(call), "epilogue")
    except CodettaError as refused:
        return _Tried(value, "no", refused.message)
    return _Tried(value, place, why_split(program) or "yes")


def _program(expression: str, role: str) -> Program:
    """A program of one output, with the parameters that its expression names."""
    words = set(re.findall(r"\w+", expression))
    names = [n for n in PARAMS if n in words or (n == "acc" and role == "epilogue")]
    options = '(gemm="nt", k=64, dtype=bf16)' if role == "epilogue" else ""
    head = f"@{role}{options}\ndef p({', '.join(f'{n}: {PARAMS[n]}' for n in names)}):"
    return parse_program(f"{head}\n    return dict(out={expression})\n")
