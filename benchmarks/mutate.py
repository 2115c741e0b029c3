"""Whether the tests notice wrong tables: a sign flipped, a term dropped or an axis swapped at random places, one a run.

python benchmarks/mutate.py --count 50 --seed 0

Works on a copy of the tree, so that nobody's edits meanwhile count. The tests of the mutated table run first, then, for
what they let pass, those of the other tables, then those of conditions. Each mutant is printed with the test that
noticed it, or as a survivor: an untested line. The exit status is the number of survivors.

A change that means the same cannot be noticed: EQUIVALENT lists those that were met, each with the reason; another
mutant is drawn in its place.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
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
OWN = {
    "ir": ("tests/ir",),
    "backends": ("tests/backends/test_evaluate.py",),
    "autodiff": ("tests/autodiff",),
    "rules": ("tests/rules",),
}
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

# (file, the line with the place marked, what comes there): why no test can tell
TYPED = "all kinds that come here have rows and columns; the question is for the type checker"
WITNESS = "a rule's example: any other on which the rule fires is as good"
ONE_DTYPE = "both operands of a GEMM have one dtype"
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("ir/ops.py", "for a in args[«1»:]:", "0"): "a type broadcast with itself is itself",
    ("ir/ops.py", "if to is Kind.COLVEC and «t.rows» is not None:", "t.cols"): TYPED,
    ("ir/ops.py", "if to is Kind.ROWVEC and «t.cols» is not None:", "t.rows"): TYPED,
    ("ir/ops.py", "if not isinstance(count, int) or «t.cols» is None:", "t.rows"): TYPED,
    ("ir/ops.py", "if t.kind is not Kind.TILE or «t.rows» is None:", "t.cols"): TYPED,
    (
        "ir/ops.py",
        "dtype = both[«0»] if both[0] is both[1] is boolean else _arithmetic(tuple(both))",
        "1",
    ): "taken only where the two are one",
    (
        "rules/canon.py",
        "return mul(n.args[«0»], 2.0)"
        " if n.op is ops.ADD and n.args[0] is n.args[1] and n.type.dtype.is_float else None",
        "1",
    ): "taken only where the two are one",
    ("autodiff/vjp.py", "if «x.type.cols» is None:", "x.type.rows"): TYPED,
    (
        "rules/norm.py",
        'if n.op is not ops.MATMUL or n.attrs[0] == "tn" or n.args[«0»].type.dtype is f16:',
        "1",
    ): ONE_DTYPE,
    (
        "rules/norm.py",
        "return sub(rebuilt(n, cast(kept, n.args[«0»].type.dtype), w), mul(mu, _column_sums(n, w, g)))",
        "1",
    ): ONE_DTYPE,
    (
        "rules/norm.py",
        "return add(rebuilt(n, cast(y, n.args[«0»].type.dtype), w), _column_sums(n, w, b))",
        "1",
    ): ONE_DTYPE,
    (
        "rules/norm.py",
        "return rebuilt(n, cast(y, n.args[«0»].type.dtype), cast(mul(w, factor), w.type.dtype))",
        "1",
    ): ONE_DTYPE,
    ("rules/pairs.py", "if is_const(found) or «n.type.cols» is None:", "n.type.rows"): TYPED,
    (
        "rules/pairs.py",
        "turned = join(split, «neg(part(q, split, 1))», part(q, split, 0))",
        "part(q, split, 1)",
    ): WITNESS,
    ("rules/pairs.py", "turned = join(split, neg(part(q, split, «1»)), part(q, split, 0))", "0"): WITNESS,
    ("rules/pairs.py", "turned = join(split, neg(part(q, split, 1)), part(q, split, «0»))", "1"): WITNESS,
    ("rules/pairs.py", "return «add(mul(q, cos), mul(turned, sin))»", "mul(turned, sin)"): WITNESS,
    ("rules/pairs.py", "return add(«mul(q, cos)», mul(turned, sin))", "q"): WITNESS,
    ("rules/pairs.py", "return add(«mul(q, cos)», mul(turned, sin))", "cos"): WITNESS,
    ("rules/pairs.py", "return add(mul(q, cos), «mul(turned, sin)»)", "turned"): WITNESS,
    (
        "rules/pairs.py",
        "sizes = split.sizes or «(width // split.parts,) * split.parts»",
        "((width // split.parts,))",
    ): "equal sizes, of which is asked whether all divide",
    (
        "rules/siblings.py",
        'gemm = whole = matmul(group[«0»].args[0], stack(*weights), "nt")',
        "1",
    ): "siblings are the GEMMs of one operand",
    (
        "rules/siblings.py",
        "for group in (g for g in groups.values() if len(g) > «1»):",
        "0",
    ): "what is alone is passed over again in _choices",
    (
        "rules/siblings.py",
        "yield from (g for g in alike.values() if len(g) > «1»)",
        "0",
    ): "what is alone is passed over again in _choices",
    (
        "backends/reference/evaluate.py",
        "some = next(iter(feed.values()), torch.empty(«0»))",
        "1",
    ): "its device is all that is asked for",
    (
        "backends/reference/evaluate.py",
        "ops.EXPAND: whole(lambda n, x: expand_to(n, x, «0»)),",
        "1",
    ): "whoever evaluates an EXPAND tells expand_to the rows; this row only fills the table",
    (
        "backends/reference/evaluate.py",
        "inside = out.cols // groups if isinstance(out.cols, int) else «0»",
        "1",
    ): "_groups has refused an unknown column count; the other case is for the type checker",
    (
        "backends/reference/evaluate.py",
        "return wide if wide.shape[1] == «1» else wide.repeat(1, groups // wide.shape[1], 1)",
        "0",
    ): "one group repeated is what broadcasting it gives",
}


@dataclass(frozen=True)
class Mutant:
    """A replacement in one file, by offsets in bytes."""

    file: str
    line: int
    place: str
    start: int
    end: int
    text: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        """The file with the replacement."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}"

    def same(self) -> str | None:
        """Why it means the same, if it is known to."""
        return EQUIVALENT.get((self.file, self.place, self.text))


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
                start, end = at(n)
                before, after = source[starts[n.lineno - 1] : start], source[end : starts[n.end_lineno or 0]]
                place = f"{before.decode()}«{text(n)}»{after.decode()}".strip()
                change = f"{kind}: {text(n)!r} -> {replacement!r}"
                yield Mutant(file, n.lineno, place, start, end, replacement, change)


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
        case ast.Call(func=ast.Name(id="matmul"), args=[a, b, *rest]):
            yield "axis", f"matmul({', '.join(text(x) for x in (b, a, *rest))})"
        case ast.BinOp(left=a, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=b):
            if not isinstance(op, ast.Mult):
                yield "sign", f"({text(a)} {'-' if isinstance(op, ast.Add) else '+'} {text(b)})"
            yield "term", f"({text(a)})"
            yield "term", f"({text(b)})"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1 as x)) if type(x) is int:
            yield "axis", "-2"
        case ast.UnaryOp(op=ast.USub(), operand=x):
            yield "sign", text(x)
        case ast.Attribute(value=x, attr=name) if name in OTHER_AXIS:
            yield "axis", f"{text(x)}.{OTHER_AXIS[name]}"
        case ast.Constant(value=str(name)) if name in OTHER_AXIS:
            yield "axis", repr(OTHER_AXIS[name])
        case ast.Constant(value=0 | 1 as axis) if type(axis) is int:
            yield "axis", str(1 - axis)


def draws(everything: list[Mutant], seed: int) -> Iterator[Mutant]:
    """All mutants in a random order."""
    random_, seen = random.Random(seed), set()
    while len(seen) < len(everything):
        i = random_.randrange(len(everything))
        if i not in seen:
            seen.add(i)
            yield everything[i]


@dataclass(frozen=True)
class Copy:
    """A copy of what the tests need, and how many seconds they may take: a mutant may make a walk that never ends."""

    tree: Path
    fast: float
    slow: float


def noticed_by(mutant: Mutant, copy: Copy) -> str | None:
    """The first test that fails with the mutant in the copy, or None."""
    path = copy.tree / "src/codetta" / mutant.file
    original = path.read_bytes()
    path.write_bytes(mutant.apply(original))
    own = OWN[mutant.file.split("/")[0]]
    others = tuple(t for t in FAST if t not in own)
    try:
        stages = ((own, copy.fast), (others, copy.fast), (SLOW, copy.slow))
        return next((found for tests, limit in stages if (found := failure(tests, copy.tree, limit))), None)
    finally:
        path.write_bytes(original)


def failure(tests: tuple[str, ...], tree: Path, limit: float | None = None) -> str | None:
    """The first of the tests that fails against the copy, if any does; a run without end is a failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "--tb=no", "-rfE", "-p", "no:cacheprovider", *tests]
    # with CI set, Hypothesis draws the same examples every time and keeps none for the next run
    here = {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    try:
        run = subprocess.run(
            command, cwd=tree, env=os.environ | here, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(tests)} (no end)"
    if run.returncode == 0:
        return None
    failed = re.search(r"^(FAILED|ERROR) (.*?)( - .*)?$", run.stdout, re.MULTILINE)
    if failed is not None:
        return failed[2] if failed[1] == "FAILED" else f"{failed[2]} (does not import)"
    if run.returncode == 4:  # the tests' own shared modules do not import
        return f"{' '.join(tests)} (do not import)"
    raise SystemExit(run.stdout[-2000:] + run.stderr[-2000:])


def copied(folder: Path) -> Copy:
    """A copy in which all tests pass; with a mutant they may take three times as long, and a minute."""
    for name in ("src", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    limits = []
    for tests in (FAST, SLOW):
        start = time.monotonic()
        if (found := failure(tests, folder)) is not None:
            raise SystemExit(f"without a mutant: {found}")
        limits.append(60 + 3 * (time.monotonic() - start))
    return Copy(folder, *limits)


def main() -> int:
    """Try mutants chosen at random; the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="say what would be tried, and try nothing")
    chosen = parser.parse_args()
    everything = [m for file in TABLES for m in mutants(file)]
    drawn = draws(everything, chosen.seed)
    print(f"{chosen.count} of {len(everything)} mutants, seed {chosen.seed}", flush=True)
    alive = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = None if chosen.list else copied(Path(folder))
        for mutant in drawn:
            if tried == chosen.count:
                break
            if (why := mutant.same()) is not None:
                print(f"  - same      {mutant}\n              {why}", flush=True)
                continue
            tried += 1
            found = None if copy is None else noticed_by(mutant, copy)
            alive += copy is not None and found is None
            state = "" if copy is None else "SURVIVES  " if found is None else "noticed   "
            print(f"{tried:3} {state}{mutant}" + (f"\n              {found}" if found else ""), flush=True)
    print(f"{alive} of {tried} survive" if copy is not None else "none tried")
    return alive


if __name__ == "__main__":
    sys.exit(main())
