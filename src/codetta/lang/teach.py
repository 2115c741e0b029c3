"""The line that should have been written: a user's statement, changed as little as the mistake asks for."""

from __future__ import annotations

import ast
import difflib
import linecache
import math
from collections.abc import Callable
from typing import Any

from codetta.errors import SourceLine
from codetta.lang.names import LANGUAGE

Change = Callable[[ast.expr], ast.expr | None]

# Names of PyTorch's and NumPy's that the language says otherwise; `x`, `y` stand for the arguments in order.
OTHERWISE = {
    "relu": "maximum(x, 0.0)",
    "clamp": "maximum(minimum(x, 1.0), 0.0)",
    "clip": "maximum(minimum(x, 1.0), 0.0)",
    "square": "x * x",
    "pow": "x * x",
    "softplus": "log(1.0 + exp(x))",
    "reciprocal": "recip(x)",
    "absolute": "abs(x)",
    "fabs": "abs(x)",
    "sum": "sum_row(x)",
    "mean": "sum_row(x)",
    "amax": "max_row(x)",
    "max": "max_row(x)",
    "logsumexp": "logsumexp_row(x)",
    "gather": "select_column(x, y)",
    "chunk": "halves(x)",
    "split": "halves(x)",
    "unflatten": "halves(x, groups=heads)",
    "cat": "join_halves(left, right)",
    "concat": "join_halves(left, right)",
    "float": "to(x, f32)",
    "double": "to(x, f64)",
    "half": "to(x, f16)",
    "bfloat16": "to(x, bf16)",
    "type": "to(x, bf16)",
    "item": "x",
    "int": "x",
}


def statement(where: SourceLine | None) -> ast.stmt | None:
    """The innermost statement at a line; None where the source cannot be read."""
    tree = _tree(where)
    line = where.line if where is not None else 0
    found = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and _covers(n, line)] if tree else []
    return max(found, key=lambda n: (n.lineno, n.col_offset), default=None)


def function_at(where: SourceLine | None) -> ast.FunctionDef | None:
    """The function around a line."""
    tree = _tree(where)
    line = where.line if where is not None else 0
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and _covers(n, line)] if tree else []
    return max(found, key=lambda n: n.lineno, default=None)


def _tree(where: SourceLine | None) -> ast.Module | None:
    lines = linecache.getlines(where.file) if where is not None else []
    try:
        return ast.parse("".join(lines)) if lines else None
    except SyntaxError:
        return None


def _covers(n: ast.stmt, line: int) -> bool:
    decorators = n.decorator_list if isinstance(n, ast.FunctionDef) else []
    return min([n.lineno, *(d.lineno for d in decorators)]) <= line <= (n.end_lineno or n.lineno)


class _Rewrite(ast.NodeTransformer):
    """Applies a change to every expression, innermost first."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.done = False

    def generic_visit(self, n: ast.AST) -> Any:
        super().generic_visit(n)
        changed = self.change(n) if isinstance(n, ast.expr) else None
        self.done |= changed is not None
        return n if changed is None else changed


def corrected(where: SourceLine | None, change: Change) -> str | None:
    """The statement at a line with a change applied; None where nothing changes."""
    found = statement(where)
    if found is None or isinstance(found, ast.FunctionDef):
        return None
    rewrite = _Rewrite(change)
    changed = rewrite.visit(found)
    return ast.unparse(ast.fix_missing_locations(changed)) if rewrite.done else None


def expression_of(text: str, *arguments: ast.expr) -> ast.expr:
    """An expression of ``OTHERWISE`` over arguments."""
    names = dict(zip("xy", arguments, strict=False))

    def put(n: ast.expr) -> ast.expr | None:
        return names.get(n.id) if isinstance(n, ast.Name) else None

    return _Rewrite(put).visit(ast.parse(text, mode="eval").body)  # type: ignore[no-any-return]


# --- choices ----------------------------------------------------------------------------------------------------------


def chosen(where: SourceLine | None) -> str:
    """An `if`, a conditional expression, `and`, `or`, `not`, a chained comparison as the language says them."""
    found = statement(where)
    if isinstance(found, ast.If):
        whole = _branch(found, _after(found, where))
        if whole is not None:
            return whole
    rewritten = corrected(where, _choice) if not isinstance(found, ast.If | ast.While) else None
    test = ast.unparse(found.test) if isinstance(found, ast.If | ast.While) else "condition"
    return rewritten or f"y = where({test}, a, b)"


def _choice(n: ast.expr) -> ast.expr | None:
    match n:
        case ast.IfExp(test=test, body=a, orelse=b):
            return _where(test, a, b)
        case ast.BoolOp(op=op, values=values):
            return _joined(values, ast.BitAnd() if isinstance(op, ast.And) else ast.BitOr())
        case ast.UnaryOp(op=ast.Not(), operand=x):
            return ast.UnaryOp(ast.Invert(), x)
        case ast.Compare(left=left, ops=signs, comparators=rest) if len(signs) > 1:
            pairs = zip([left, *rest[:-1]], signs, rest, strict=True)
            return _joined([ast.Compare(a, [sign], [b]) for a, sign, b in pairs], ast.BitAnd())
    return None


def _joined(values: list[ast.expr], op: ast.operator) -> ast.expr:
    found = values[0]
    for v in values[1:]:
        found = ast.BinOp(found, op, v)
    return found


def _where(test: ast.expr, a: ast.expr, b: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("where"), [test, a, b], [])


def _after(found: ast.If, where: SourceLine | None) -> ast.stmt | None:
    """The statement behind an `if` without an else."""
    function = function_at(where)
    body = function.body if function is not None else []
    lines = [n.lineno for n in body]
    here = lines.index(found.lineno) if found.lineno in lines else len(body)
    return body[here + 1] if here + 1 < len(body) else None


def _branch(found: ast.If, behind: ast.stmt | None) -> str | None:
    match (found.body, found.orelse or ([behind] if behind is not None else [])):
        case ([ast.Return(value=a)], [ast.Return(value=b)]) if a is not None and b is not None:
            return ast.unparse(ast.Return(_where(found.test, a, b)))
    match (found.body, found.orelse):
        case ([ast.Assign(targets=[ast.Name(id=name)], value=a)], [ast.Assign(targets=[ast.Name(id=same)], value=b)]):
            return f"{name} = {ast.unparse(_where(found.test, a, b))}" if name == same else None
        case ([ast.Assign(targets=[ast.Name(id=name)], value=a)], []):
            return f"{name} = {ast.unparse(_where(found.test, a, ast.Name(name)))}"
    return None


# --- what a traced value has not --------------------------------------------------------------------------------------


def without_numbers(where: SourceLine | None) -> str | None:
    """A statement without `float(x)`, `int(x)`, `len(x)`, and with `exp(x)` in the place of `math.exp(x)`."""

    def change(n: ast.expr) -> ast.expr | None:
        match n:
            case ast.Call(func=ast.Name(id="float" | "int" | "round" | "complex"), args=[x, *_]):
                return x
            case ast.Call(func=ast.Attribute(value=ast.Name(id="math" | "np" | "numpy"), attr=name), args=args):
                return _said(name, args, n, None)
            case ast.Call(func=ast.Name(id="len" | "range"), args=[x, *_]):
                return ast.Name("columns_of_" + ast.unparse(x)) if isinstance(x, ast.Name) else None
        return None

    return corrected(where, change)


def taken_apart(where: SourceLine | None) -> str | None:
    """An unpacking, an index or a loop, as columns come apart."""
    found = statement(where)
    match found:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=value) if len(names) == 2:
            return f"{', '.join(map(ast.unparse, names))} = halves({ast.unparse(value)})"
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=value):
            return f"{', '.join(map(ast.unparse, names))} = equal_columns({ast.unparse(value)}, {len(names)})"
        case ast.For(target=ast.Name(id=name), iter=value):
            return f"for {name} in halves({ast.unparse(value)}):"

    def change(n: ast.expr) -> ast.expr | None:
        if isinstance(n, ast.Subscript):
            return ast.Subscript(ast.Call(ast.Name("halves"), [n.value], []), ast.Constant(0), ast.Load())
        return None

    return corrected(where, change)


def powers(where: SourceLine | None) -> str | None:
    """Small whole powers as products, powers of a number by the exponential function."""

    def change(n: ast.expr) -> ast.expr | None:
        match n:
            case ast.BinOp(left=x, op=ast.Pow(), right=ast.Constant(value=int(p))) if 2 < p < 6:
                return _product(x, p)
            case ast.BinOp(left=ast.Constant(value=(int() | float()) as base), op=ast.Pow(), right=x) if base > 0:
                return expression_of(f"exp(x * {math.log(base)!r})", x)
            case ast.BinOp(left=x, op=ast.Pow(), right=p):
                return expression_of("exp(y * log(x))", x, p)
        return None

    return corrected(where, change)


def _product(x: ast.expr, times: int) -> ast.expr:
    found = x
    for _ in range(times - 1):
        found = ast.BinOp(found, ast.Mult(), x)
    return found


# --- names ------------------------------------------------------------------------------------------------------------


def renamed(where: SourceLine | None, name: str) -> str | None:
    """A statement that calls ``name`` of another library, or no name at all: as the language says it."""
    close = next(iter(difflib.get_close_matches(name, LANGUAGE, n=1, cutoff=0.6)), None)

    def change(n: ast.expr) -> ast.expr | None:
        match n:
            case ast.Call(func=ast.Name(id=called), args=args) if called == name:
                return _said(name, args, n, close)
            case ast.Call(func=ast.Attribute(value=owner, attr=called), args=args) if called == name:
                own = [owner] if not _is_module(owner) else []
                return _said(name, [*own, *args], n, close)
            case ast.Name(id=used) if used == name and close is not None and name not in OTHERWISE:
                return ast.Name(close)
            case ast.Attribute(attr="T" | "mT") if name in ("T", "mT"):
                return n.value
        return None

    return corrected(where, change)


def _said(name: str, args: list[ast.expr], call: ast.Call, close: str | None) -> ast.expr | None:
    if name in OTHERWISE:
        return expression_of(OTHERWISE[name], *args)
    if name in LANGUAGE:
        return ast.Call(ast.Name(name), args, call.keywords)
    return ast.Call(ast.Name(close), args, call.keywords) if close is not None else None


def _is_module(n: ast.expr) -> bool:
    return isinstance(n, ast.Name | ast.Attribute) and ast.unparse(n).split(".")[0] in (
        "torch",
        "math",
        "np",
        "numpy",
        "F",
        "nn",
        "functional",
    )


def without_extras(where: SourceLine | None, error: TypeError | AttributeError) -> str | None:
    """A call of the language's with too many arguments, without them."""
    if "positional argument" not in str(error):
        return None

    def change(n: ast.expr) -> ast.expr | None:
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in LANGUAGE and len(n.args) > 1:
            return ast.Call(n.func, n.args[:1], n.keywords)
        return None

    return corrected(where, change)


def stored_last(where: SourceLine | None) -> str:
    """The `return` of a function that has none, or none with names."""
    function = function_at(where)
    body = function.body if function is not None else []
    match body[-1] if body else None:
        case ast.Return(value=ast.Tuple(elts=values)) if values:
            names = [n.id if isinstance(n, ast.Name) else f"y{i}" for i, n in enumerate(values)]
            pairs = zip(names, values, strict=True)
            return f"return dict({', '.join(f'{n}={ast.unparse(v)}' for n, v in pairs)})"
        case ast.Expr(value=value):
            return f"return dict(y={ast.unparse(value)})"
        case ast.Assign(targets=[ast.Name(id=name)]):
            return f"return dict({name}={name})"
    return "return dict(y=acc)"
