"""Whether ``codetta check --quick`` notices a wrong epilogue: mutants of each worked example, chosen at random.

python benchmarks/mutate_epilogues.py --count 10 --seed 0

A mutant flips a sign, takes another operand, reduces another axis or leaves a term out, in the program alone: its
reference stays right. It is *wrong* if a value or a gradient differs, *refused* if the language or the reference does
not take it. What survives is printed. The exit status is the number of survivors. Each example's file has ten or more.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutate import replacements

from codetta.author.check import check
from codetta.author.file import Authored, load
from codetta.errors import CodettaError

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "epilogues"
AXES = {"row": "col", "col": "row", "inside": "groups", "groups": "inside"}
LANES = {"halves": "adjacent", "adjacent": "halves", "join_halves": "join_adjacent", "join_adjacent": "join_halves"}
MAPS = ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "rsqrt", "exp")
FOLDS = {"sum": "max", "max": "sum", "absmax": "max"}
INDICES = ("row_index", "column_index")  # of their argument only the shape counts
TINY = 1e-9  # a smaller number guards against zeros, which random inputs are not
KINDS = ("sign", "operand", "axis", "term")
NEEDED = sorted({*LANES, *MAPS, *(f"{fold}_{axis}" for fold in FOLDS for axis in AXES)})  # by what mutants call


@dataclass(frozen=True)
class Mutant:
    """One change of a program, as the whole file's text."""

    file: Path
    name: str
    line: int
    kind: str
    change: str
    text: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}: {self.kind}: {self.change}"


def mutants(authored: Authored) -> Iterator[Mutant]:
    """Every mutation of a program, and of the functions of its file that it calls."""
    source = authored.file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    reached = _reached(authored.epilogue.fn.__name__, functions)
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]

    def at(n: ast.expr) -> tuple[int, int]:
        return starts[n.lineno - 1] + n.col_offset, starts[(n.end_lineno or 1) - 1] + (n.end_col_offset or 0)

    def text(n: ast.AST) -> str:
        return source.encode()[slice(*at(n))].decode()  # type: ignore[arg-type]

    for function in reached:
        names, everything = _names(function), [n for s in function.body for n in ast.walk(s)]
        only_shapes = {a for n in everything if isinstance(n, ast.Call) and text(n.func) in INDICES for a in n.args}
        for n in (n for n in everything if isinstance(n, ast.expr) and n not in only_shapes):
            for kind, new in _replacements(n, names, text):
                start, end = at(n)
                whole = source.encode()[:start] + new.encode() + source.encode()[end:]
                change = f"{text(n)!r} -> {new!r}"
                yield Mutant(authored.file, authored.name, n.lineno, kind, change, whole.decode())


def _reached(name: str, functions: dict[str, ast.FunctionDef]) -> list[ast.FunctionDef]:
    found, todo = [], [name]
    while todo:
        function = functions[todo.pop()]
        if function not in found:
            found.append(function)
            used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
            todo += [u for u in used & functions.keys() if not u.endswith(("_reference", "_inputs"))]
    return found


def _names(function: ast.FunctionDef) -> list[str]:
    """The values that a function has by name."""
    stored = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return list(dict.fromkeys([*(a.arg for a in function.args.args if a.annotation is not None), *stored]))


def _replacements(n: ast.expr, names: list[str], text) -> Iterator[tuple[str, str]]:
    """What an expression may become: as tables are mutated, and what only epilogues have."""
    if isinstance(n, ast.BinOp | ast.UnaryOp):
        yield from replacements(n, set(), text)
    match n:
        case ast.BinOp(left=a, op=ast.Div(), right=b):
            yield "term", f"({text(a)})"
            yield "operand", f"({text(a)} * {text(b)})"
        case ast.BinOp(left=a, op=ast.Sub(), right=b):
            yield "operand", f"({text(b)} - {text(a)})"
        case ast.Name(id=name, ctx=ast.Load()) if name in names:
            yield from (("operand", other) for other in names if other != name)
        case ast.Constant(value=int() | float() as number) if type(number) is not bool and abs(number) > TINY:
            yield "operand", repr(2 * number)
        case ast.Tuple(elts=[a, b], ctx=ast.Store()):
            yield "operand", f"{text(b)}, {text(a)}"
        case ast.Call(func=ast.Name(id=name), args=args):
            yield from _calls(name, args, text(n), text)
        case ast.Compare(left=a, ops=[ast.GtE() | ast.Gt()], comparators=[b]):
            yield "sign", f"({text(a)} < {text(b)})"


def _calls(name: str, args: list[ast.expr], whole: str, text) -> Iterator[tuple[str, str]]:
    fold, _, target = name.partition("_")
    inside = whole.removeprefix(name)
    if fold in FOLDS and target:
        yield "operand", f"{FOLDS[fold]}_{target}{inside}"
        if target in AXES:
            yield "axis", f"{fold}_{AXES[target]}{inside}"
    if name in LANES:
        yield "axis", LANES[name] + inside
    if len(args) > 1 and name.startswith("join"):
        rest = inside[inside.index(text(args[-1])) + len(text(args[-1])) :]
        yield "operand", f"{name}({', '.join(text(a) for a in reversed(args))}{rest}"
    if name == "where" and len(args) == 3:
        yield "operand", f"where({text(args[0])}, {text(args[2])}, {text(args[1])})"
    if name in MAPS and len(args) == 1:
        yield "term", f"({text(args[0])})"
        yield from (("operand", other + inside) for other in MAPS if other != name)


def chosen(authored: Authored, count: int, seed: int) -> list[Mutant]:
    """Mutants at random, the kinds in turn as far as there are some of each."""
    drawn = random.Random(f"{authored.name} {seed}")
    by_kind: dict[str, list[Mutant]] = {}
    for m in dict.fromkeys(mutants(authored)):
        by_kind.setdefault(m.kind, []).append(m)
    for found in by_kind.values():
        drawn.shuffle(found)
    picked: list[Mutant] = []
    while len(picked) < count and any(by_kind.values()):
        for kind in KINDS:
            if by_kind.get(kind) and len(picked) < count:
                picked.append(by_kind[kind].pop())
    return picked


def verdict(m: Mutant, folder: Path) -> tuple[str, str]:
    """ "wrong", "refused" or "survives", and what was told."""
    file = folder / f"mutant_{m.file.stem}.py"
    imports = f"from codetta import {', '.join(NEEDED)}\n"
    file.write_text(m.text.replace("from codetta import", f"{imports}from codetta import", 1), encoding="utf-8")
    try:
        (found,) = check(f"{file}::{m.name}", quick=True).programs
    except CodettaError as error:
        return "refused", error.message
    bad = [c for c in found.comparisons if not c.ok]
    return ("wrong", f"{bad[0].kind} {bad[0]}") if bad else ("survives", "")


def examples() -> list[Authored]:
    """Every program of the worked examples."""
    return [a for file in sorted(EXAMPLES.glob("*.py")) for a in load(str(file))]


def main() -> int:
    """Try mutants; the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="mutants of each program")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for authored in examples():
            picked = chosen(authored, asked.count, asked.seed)
            own: Counter[str] = Counter()
            for m in picked:
                state, told = verdict(m, Path(folder))
                own[state] += 1
                if state == "survives":
                    print(f"SURVIVES {m}", flush=True)
                else:
                    print(f"{state:8} {m}\n{textwrap.indent(told, ' ' * 9)}", flush=True)
            print(f"{authored.file.name} {authored.name}: {dict(own)}", flush=True)
            total += own
    print(f"{sum(total.values())} mutants: {dict(total)}")
    return total["survives"]


if __name__ == "__main__":
    sys.exit(main())
