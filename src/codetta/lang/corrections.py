"""For an op that its operands do not fit: the statement, or the parameter's annotation, that would have been right."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from codetta.core.node import Node, Op
from codetta.core.types import DTYPES, Dim, Kind, Sym, boolean
from codetta.errors import SourceLine
from codetta.ir import ops
from codetta.ir.split import Split
from codetta.lang.teach import corrected, function_at

PARTS = ("halves", "adjacent", "columns", "equal_columns")
REDUCTIONS = ("sum", "max", "absmax")
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
KNOWN = {"bfloat16": "bf16", "bf16": "bf16", "float16": "f16", "half": "f16", "float64": "f64", "double": "f64"}
KNOWN |= {"float32": "f32", "int64": "i64", "long": "i64", "int32": "i32", "bool": "boolean"}
Names = Mapping[Node, str]


def correction(op: Op, args: Sequence[Node], attrs: Sequence[object], names: Names, where: SourceLine) -> str | None:
    """The code that should stand there; None where only words help."""
    if op is ops.CAST:
        return _dtype(where, attrs[0])
    rule = RULES.get(op)
    found = rule(args, attrs, names, where) if rule is not None else None
    if found is None and op.family == "map":
        found = _booleans(args, names, where) or _sizes(args, names, where)
    return found


def annotated(where: SourceLine, name: str, annotation: str) -> str | None:
    """The ``def`` around a line, with one parameter annotated otherwise."""
    function = function_at(where)
    found = next((a for a in function.args.args if a.arg == name), None) if function is not None else None
    if function is None or found is None:
        return None
    found.annotation = ast.parse(annotation, mode="eval").body
    return f"def {function.name}({ast.unparse(function.args)}):"


def parts_first(where: SourceLine, call: ast.Call | None, whole: str) -> str | None:
    """A line that used two parts, or a whole where a part belongs: taken apart on a line of its own first."""

    def change(n: ast.expr) -> ast.expr | None:
        is_call = isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in PARTS
        if call is None and is_call and ast.unparse(n) == whole:
            return ast.Name("left")
        return ast.Name("left") if call is not None and isinstance(n, ast.Name) and n.id == whole else None

    rest = corrected(where, change)
    taken = whole if call is None else ast.unparse(call)
    return None if rest is None else f"left, right = {taken}\n{rest}"


def first_parts(where: SourceLine) -> str | None:
    """The correction where all parts of a value were used as one."""
    found: list[str] = []

    def note(n: ast.expr) -> None:
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in PARTS:
            found.append(ast.unparse(n))

    corrected(where, note)
    return parts_first(where, None, found[0]) if found else None


def _called(where: SourceLine, functions: Sequence[str], change: Callable[[ast.Call], ast.expr | None]) -> str | None:
    """The statement with the calls of these functions changed."""

    def rewrite(n: ast.expr) -> ast.expr | None:
        known = isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in functions
        return change(n) if known and isinstance(n, ast.Call) else None

    return corrected(where, rewrite)


# --- dtypes -----------------------------------------------------------------------------------------------------------


def _dtype(where: SourceLine, given: object) -> str | None:
    told = str(given).rpartition(".")[2].lower()
    name = KNOWN.get(told) or (told if told in DTYPES else "bf16")
    return _called(where, ("to",), lambda n: ast.Call(n.func, [n.args[0], ast.Name(name)], []) if n.args else None)


def _booleans(args: Sequence[Node], names: Names, where: SourceLine) -> str | None:
    """Arithmetic on a condition, or a number taken as one."""
    conditions = [a.type.dtype is boolean for a in args]
    known = {names[a] for a in args if a.type.dtype is boolean and a in names}

    def is_condition(n: ast.expr) -> bool:
        return isinstance(n, ast.Compare) or (isinstance(n, ast.Name) and n.id in known)

    def as_number(n: ast.expr) -> ast.expr:
        one, zero = ast.Constant(1.0), ast.Constant(0.0)
        return ast.Call(ast.Name("where"), [n, one, zero], []) if is_condition(n) else n

    def as_condition(n: ast.expr) -> ast.expr:
        return n if is_condition(n) else ast.Compare(n, [ast.Gt()], [ast.Constant(0)])

    def change(n: ast.expr) -> ast.expr | None:
        match n:
            case ast.BinOp(left=a, op=op, right=b) if isinstance(op, ARITHMETIC) and any(conditions):
                return ast.BinOp(as_number(a), op, as_number(b)) if is_condition(a) or is_condition(b) else None
            case ast.BinOp(left=a, op=(ast.BitAnd() | ast.BitOr()) as op, right=b) if not all(conditions):
                return ast.BinOp(as_condition(a), op, as_condition(b))
        return None

    return corrected(where, change)


def _condition(args: Sequence[Node], attrs: Sequence[object], names: Names, where: SourceLine) -> str | None:
    if args[0].type.dtype is boolean:
        return None

    def change(n: ast.Call) -> ast.expr:
        return ast.Call(n.func, [ast.Compare(n.args[0], [ast.Gt()], [ast.Constant(0)]), *n.args[1:]], n.keywords)

    return _called(where, ("where",), change)


# --- kinds and sizes --------------------------------------------------------------------------------------------------


def _reduction(args: Sequence[Node], attrs: Sequence[object], names: Names, where: SourceLine) -> str | None:
    (x,) = args
    fn = str(attrs[0])
    functions = [f"{fn}_{target}" for target in ("row", "col", "inside", "groups", "all")]
    if x.type.kind is attrs[1]:  # it is one number per row, or per column, already
        return _called(where, functions, lambda n: n.args[0])
    told = names.get(x, "x")
    found = _called(where, functions, lambda n: ast.Name("total"))
    return found and f"{found}  # total: Scalar, from a @finalize before: {fn}_all({told})"


def _part(args: Sequence[Node], attrs: Sequence[object], names: Names, where: SourceLine) -> str | None:
    t, split = args[0].type, attrs[0]
    if t.kind not in (Kind.TILE, Kind.ROWVEC, Kind.TABLE):  # it has no columns: the same for all parts
        return _called(where, PARTS, lambda n: ast.Tuple([n.args[0]] * 2, ast.Load()))
    if not isinstance(split, Split) or not isinstance(t.cols, int):
        return None
    fits = [g for g in range(1, split.groups + 1) if t.cols % (g * split.parts) == 0]

    def change(n: ast.Call) -> ast.expr | None:
        return ast.Call(n.func, n.args, [ast.keyword("groups", ast.Constant(fits[-1]))]) if fits else None

    return _called(where, PARTS, change)


def _select(args: Sequence[Node], attrs: Sequence[object], names: Names, where: SourceLine) -> str | None:
    index = args[1] if len(args) > 1 else None
    return annotated(where, names.get(index, ""), "ColVec[i64]") if index is not None else None


def _sizes(args: Sequence[Node], names: Names, where: SourceLine) -> str | None:
    """Two values whose columns, or rows, differ: a vector as long as both lanes, or an annotation with another size."""
    params = [a for a in args if a.op is ops.INPUT and a in names and names[a] != "acc"]
    for p in params:
        for other in (a.type for a in args if a is not p and a.type.cols is not None):
            if p.type.cols is not None and p.type.cols == _double(other.cols or 0):
                return parts_first(where, _halves(names[p]), names[p])
            if p.type.kind in (Kind.TILE, Kind.ROWVEC):
                return annotated(where, names[p], _spelled(p.type.kind, other.cols or 0))
            if isinstance(p.type.cols, int) and isinstance(other.cols, int):
                fits = max((d for d in range(1, p.type.cols + 1) if other.cols % d == 0), default=1)
                return annotated(where, names[p], _spelled(p.type.kind, fits))
    return None


def _double(d: Dim) -> Dim:
    return Sym(d.name, d.scale * Fraction(2)) if isinstance(d, Sym) else 2 * d


def _halves(name: str) -> ast.Call:
    return ast.Call(ast.Name("halves"), [ast.Name(name)], [])


def _spelled(kind: Kind, cols: Dim) -> str:
    if cols == Sym("N"):
        return kind.value
    return f'{kind.value}["{cols}"]' if isinstance(cols, Sym) else f"{kind.value}[{cols}]"


RULES: dict[Op, Callable[[Sequence[Node], Sequence[object], Names, SourceLine], str | None]] = {
    ops.REDUCE: _reduction,
    ops.PART: _part,
    ops.SELECT: _select,
    ops.WHERE: _condition,
}
