"""Whether the tests notice wrong tables: a sign flipped, a term dropped or an axis swapped at random places, one a run.

python benchmarks/mutate.py --count 50 --seed 0

Works on a copy of the tree, so that nobody's edits meanwhile count. The fast tests of the tables run first, then, for
what they let pass, those of conditions. Survivors are printed: each is an untested line, or a change that means the
same. The exit status is their number.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLES = (
    "ir/ops.py",
    "backends/reference/evaluate.py",
    "autodiff/vjp.py",
    "autodiff/inner.py",
    "rules/canon.py",
    "rules/norm.py",
    "rules/pairs.py",
    "rules/scale.py",
    "rules/siblings.py",
)
FAST = ("tests/ir", "tests/autodiff", "tests/rules", "tests/backends/test_evaluate.py", "tests/lang/test_trace.py")
SLOW = (
    "tests/backends/test_reference.py",
    "tests/partition",
    "tests/capture/test_aten.py",
    "tests/cases/test_norms.py",
)
OTHER_AXIS = {
    "ROWVEC": "COLVEC",
    "COLVEC": "ROWVEC",
    "rows": "cols",
    "cols": "rows",
    "nt": "nn",
    "nn": "nt",
    "tn": "nt",
    "row": "col",
    "col": "row",
    "M": "N",
    "N": "M",
}
OPPOSITE = {"add": "sub", "sub": "add"}


@dataclass(frozen=True)
class Mutant:
    """A replacement in one file, by offsets in bytes."""

    file: str
    line: int
    start: int
    end: int
    text: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        """The file with the replacement."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}"


def mutants(file: str) -> Iterator[Mutant]:
    """Every mutation of a file of tables."""
    source = (ROOT / "src/codetta" / file).read_bytes()
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    known = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    known |= {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}

    def at(n: ast.expr) -> tuple[int, int]:
        return starts[n.lineno - 1] + n.col_offset, starts[(n.end_lineno or 0) - 1] + (n.end_col_offset or 0)

    def text(n: ast.expr) -> str:
        start, end = at(n)
        return source[start:end].decode()

    skipped = {id(m) for n in ast.walk(tree) for m in _not_mathematics(n)}
    for n in ast.walk(tree):
        if isinstance(n, ast.expr) and id(n) not in skipped:
            for kind, replacement in replacements(n, known, text):
                yield Mutant(file, n.lineno, *at(n), replacement, f"{kind}: {text(n)!r} -> {replacement!r}")


def _not_mathematics(n: ast.AST) -> Iterator[ast.AST]:
    """Annotations, messages and the rules' names and examples, which say what a line is and not what it does."""
    if isinstance(n, (ast.FunctionDef, ast.Lambda)):
        arguments = [*n.args.args, *n.args.kwonlyargs]
        parts = [a.annotation for a in arguments] + ([n.returns, *n.decorator_list] if hasattr(n, "returns") else [])
    elif isinstance(n, ast.AnnAssign):
        parts = [n.annotation]
    elif isinstance(n, ast.Raise):
        parts = [n.exc]
    else:
        return
    for part in parts:
        if part is not None:
            yield from ast.walk(part)


def replacements(n: ast.expr, known: set[str], text) -> Iterator[tuple[str, str]]:
    """What an expression may become, with the kind of mutation."""
    match n:
        case ast.Call(func=ast.Name(id="neg"), args=[x]):
            yield "sign", text(x)
        case ast.Call(func=ast.Name(id=name), args=[a, b], keywords=[]) if name in ("add", "sub", "mul", "div"):
            if OPPOSITE.get(name) in known:
                yield "sign", f"{OPPOSITE[name]}({text(a)}, {text(b)})"
            yield "term", text(a)
            if name in ("add", "mul"):
                yield "term", text(b)
        case ast.Call(func=ast.Name(id="matmul"), args=[a, b, *_]):
            yield "axis", text(n).replace(text(a), "\0", 1).replace(text(b), text(a), 1).replace("\0", text(b), 1)
        case ast.BinOp(left=a, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=b):
            if not isinstance(op, ast.Mult):
                yield "sign", f"({text(a)} {'-' if isinstance(op, ast.Add) else '+'} {text(b)})"
            yield "term", f"({text(a)})"
            yield "term", f"({text(b)})"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            yield "axis", "-2"
        case ast.UnaryOp(op=ast.USub(), operand=x):
            yield "sign", text(x)
        case ast.Attribute(value=x, attr=name) if name in OTHER_AXIS:
            yield "axis", f"{text(x)}.{OTHER_AXIS[name]}"
        case ast.Constant(value=str(name)) if name in OTHER_AXIS:
            yield "axis", repr(OTHER_AXIS[name])
        case ast.Constant(value=0 | 1 as axis) if type(axis) is int:
            yield "axis", str(1 - axis)


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether all tests pass with the mutant in a copy of the tree."""
    path = tree / "src/codetta" / mutant.file
    original = path.read_bytes()
    path.write_bytes(mutant.apply(original))
    try:
        return all(passes(tests, tree) for tests in (FAST, SLOW))
    finally:
        path.write_bytes(original)


def passes(tests: tuple[str, ...], tree: Path) -> bool:
    """Whether tests pass against the copy; a run without end is a failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return False
    if run.returncode not in (0, 1, 2, 4):  # 2, 4: the mutant does not even import
        raise SystemExit(run.stdout.decode()[-2000:] + run.stderr.decode()[-2000:])
    return run.returncode == 0


def main() -> int:
    """Try mutants chosen at random; the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="say what would be tried, and try nothing")
    chosen = parser.parse_args()
    everything = [m for file in TABLES for m in mutants(file)]
    tried = random.Random(chosen.seed).sample(everything, min(chosen.count, len(everything)))
    print(f"{len(tried)} of {len(everything)} mutants, seed {chosen.seed}", flush=True)
    if chosen.list:
        print(*tried, sep="\n")
        return 0
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("src", "tests", "docs", "examples"):
            shutil.copytree(ROOT / name, tree / name)
        shutil.copy(ROOT / "pyproject.toml", tree)
        if not all(passes(tests, tree) for tests in (FAST, SLOW)):
            raise SystemExit("the tests fail without a mutant")
        for i, mutant in enumerate(tried, 1):
            found = survives(mutant, tree)
            alive += [mutant] * found
            print(f"{i:3} {'SURVIVES' if found else 'noticed '} {mutant}", flush=True)
    print(f"{len(alive)} of {len(tried)} survive")
    return len(alive)


if __name__ == "__main__":
    sys.exit(main())
