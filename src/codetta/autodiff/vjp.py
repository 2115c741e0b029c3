"""The one table of derivatives: for each op, the cotangents of its arguments from that of its result.

A cotangent may have fewer axes than its value; it then means the same number repeated. ``None`` is no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

from codetta.core.node import Node, Op, node
from codetta.core.types import Kind, Type
from codetta.errors import UnsupportedError
from codetta.ir import ops
from codetta.ir.build import (
    Value,
    add,
    apply,
    cast,
    column,
    div,
    expand,
    join,
    matmul,
    mul,
    neg,
    part,
    reduce,
    sub,
    sum_to,
    turn,
    where,
)
from codetta.ir.split import Split

Cotangents = tuple[Node | None, ...]
Rule = Callable[[Node, Node], Cotangents]


def unbroadcast(g: Node, like: Type, out: Type) -> Node | None:
    """The cotangent ``g`` of a result of type ``out`` summed over the axes that an argument of type ``like`` lacks."""
    if not like.dtype.is_float:
        return None
    if like.kind is out.kind:
        return g
    g = expand(g, out)
    if like.kind is Kind.SCALAR and out.kind is Kind.TILE:
        return sum_to(sum_to(g, Kind.COLVEC), Kind.SCALAR)
    if like.kind is Kind.GROUPVEC:
        return sum_to(g, Kind.GROUPVEC, like.cols if isinstance(like.cols, int) else None)
    if like.kind is Kind.TABLE:
        if not (isinstance(out.cols, int) and isinstance(like.cols, int)):
            raise UnsupportedError(f"the gradient of a {like} needs known sizes")
        return sum_to(g, Kind.TABLE, out.cols // like.cols)
    return sum_to(g, like.kind)


def _unary(factor: Callable[[Node, Node], Value]) -> Rule:
    """An elementwise op of one argument: ``factor(x, y)`` is dy/dx."""
    return lambda n, g: (mul(g, factor(n.args[0], n)),)


def _binary(da: Callable[[Node, Node, Node], Value], db: Callable[[Node, Node, Node], Value]) -> Rule:
    """An elementwise op of two arguments: the two functions give the cotangents from (a, b, g), before reduction."""

    def rule(n: Node, g: Node) -> Cotangents:
        a, b = n.args
        parts = ((a, da), (b, db))
        return tuple(_reduced(d(a, b, g), x, n) if x.type.dtype.is_float else None for x, d in parts)

    return rule


def _reduced(g: Value, x: Node, n: Node) -> Node | None:
    return unbroadcast(g if isinstance(g, Node) else expand(g, n.type), x.type, n.type)


def _choice(better: Op) -> Rule:
    """maximum and minimum: to the better argument, halved where both are equal, as PyTorch does."""

    def share(a: Node, b: Node, g: Node) -> Node:
        return where(apply(better, a, b), g, where(apply(ops.EQ, a, b), mul(g, 0.5), 0.0))

    return _binary(share, lambda a, b, g: share(b, a, g))


def _where(n: Node, g: Node) -> Cotangents:
    condition, a, b = n.args
    return None, _reduced(where(condition, g, 0.0), a, n), _reduced(where(condition, 0.0, g), b, n)


def _silu(x: Node, y: Node) -> Node:
    s = apply(ops.SIGMOID, x)
    return mul(s, add(1.0, mul(x, sub(1.0, s))))


def _gelu(x: Node, y: Node) -> Node:
    cdf = mul(0.5, add(1.0, apply(ops.ERF, mul(x, sqrt(0.5)))))
    return add(cdf, mul(mul(x, 1 / sqrt(2 * pi)), apply(ops.EXP, mul(-0.5, mul(x, x)))))


def _gelu_tanh(x: Node, y: Node) -> Node:
    """Of x s(v): with s(v) = (1 + tanh(v / 2)) / 2 it takes half the arithmetic, and nothing cancels."""
    square, c = mul(x, x), 2 * sqrt(2 / pi)
    s = apply(ops.SIGMOID, mul(mul(x, c), add(1.0, mul(0.044715, square))))
    slope = mul(c, add(1.0, mul(3 * 0.044715, square)))
    # where s is saturated, s (1 - s) is 0 and the slope large: the product is formed innermost first, never inf * 0
    return add(s, mul(mul(mul(s, sub(1.0, s)), x), slope))


def _sign(x: Node) -> Node:
    return where(apply(ops.GT, x, 0.0), 1.0, where(apply(ops.LT, x, 0.0), -1.0, 0.0))


def _part(n: Node, g: Node) -> Cotangents:
    split, index = n.attrs
    if not isinstance(split, Split):
        raise UnsupportedError(f"{n} has no split")
    g = expand(g, n.type)
    return (join(split, *(g if i == index else 0.0 for i in range(split.parts))),)


def _join(n: Node, g: Node) -> Cotangents:
    split = n.attrs[0]
    if not isinstance(split, Split):
        raise UnsupportedError(f"{n} has no split")
    g = expand(g, n.type)
    found: list[Node | None] = []
    for i, a in enumerate(n.args):
        own = part(g, split, i)
        found.append(unbroadcast(own, a.type, own.type))
    return tuple(found)


def _stack(n: Node, g: Node) -> Cotangents:
    g = expand(g, n.type)
    sizes = [s for s in n.attrs if isinstance(s, int)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pairs = zip(n.args, starts, sizes, strict=True)
    rows = (node(ops.TAKE_ROWS, g, attrs=(s, s + z)) if a.type.kind is Kind.TILE else None for a, s, z in pairs)
    return tuple(rows)


def _take_rows(n: Node, g: Node) -> Cotangents:
    (start, stop), total = n.attrs, n.args[0].type.rows
    if not (isinstance(start, int) and isinstance(stop, int) and isinstance(total, int)):
        raise UnsupportedError(f"{n} has no static rows")
    zero = node(ops.CONST, attrs=(0.0,))
    blocks = [(zero, start), (expand(g, n.type), stop - start), (zero, total - stop)]
    kept = [(b, size) for b, size in blocks if size]
    return (node(ops.STACK, *(b for b, _ in kept), attrs=tuple(size for _, size in kept)),)


def _reduce(n: Node, g: Node) -> Cotangents:
    (x,), (fn, to, groups) = n.args, n.attrs
    if not isinstance(to, Kind):
        raise UnsupportedError(f"{n} has no target kind")
    if fn == "sum":
        return (expand(g, x.type),)
    size, sign = (apply(ops.ABS, x), _sign(x)) if fn == "absmax" else (x, 1.0)
    hit = where(apply(ops.EQ, size, n), 1.0, 0.0)
    ties = reduce(hit, "sum", to, groups if isinstance(groups, int) else None)
    return (mul(mul(hit, sign), div(g, ties)),)


def _select(n: Node, g: Node) -> Cotangents:
    x, index = n.args
    if x.type.cols is None:
        raise UnsupportedError(f"{n} selects from {x.type}")
    return where(apply(ops.EQ, column(x.type.cols), index), g, 0.0), None


def _matmul(n: Node, g: Node) -> Cotangents:
    (a, b), form = n.args, n.attrs[0]
    g = cast(expand(g, n.type), a.type.dtype)
    if form == "nt":
        return matmul(g, b, "nn"), matmul(g, a, "tn")
    if form == "nn":
        return matmul(g, b, "nt"), matmul(a, g, "tn")
    return matmul(b, g, "nt"), matmul(a, g, "nn")


def _none(n: Node, g: Node) -> Cotangents:
    return (None,) * len(n.args)


VJP: dict[Op, Rule] = {
    ops.NEG: lambda n, g: (neg(g),),
    ops.ABS: _unary(lambda x, y: _sign(x)),
    ops.EXP: _unary(lambda x, y: y),
    ops.LOG: _unary(lambda x, y: apply(ops.RECIP, x)),
    ops.TANH: _unary(lambda x, y: sub(1.0, mul(y, y))),
    ops.ERF: _unary(lambda x, y: mul(2 / sqrt(pi), apply(ops.EXP, neg(mul(x, x))))),
    ops.SQRT: _unary(lambda x, y: div(0.5, y)),
    ops.RSQRT: _unary(lambda x, y: mul(-0.5, mul(y, mul(y, y)))),
    ops.RECIP: _unary(lambda x, y: neg(mul(y, y))),
    ops.SIN: _unary(lambda x, y: apply(ops.COS, x)),
    ops.COS: _unary(lambda x, y: neg(apply(ops.SIN, x))),
    ops.SIGMOID: _unary(lambda x, y: mul(y, sub(1.0, y))),
    ops.SILU: _unary(_silu),
    ops.GELU: _unary(_gelu),
    ops.GELU_TANH: _unary(_gelu_tanh),
    ops.ADD: _binary(lambda a, b, g: g, lambda a, b, g: g),
    ops.SUB: _binary(lambda a, b, g: g, lambda a, b, g: neg(g)),
    ops.MUL: _binary(lambda a, b, g: mul(g, b), lambda a, b, g: mul(g, a)),
    ops.DIV: _binary(lambda a, b, g: div(g, b), lambda a, b, g: neg(div(mul(g, a), mul(b, b)))),
    ops.MAXIMUM: _choice(ops.GT),
    ops.MINIMUM: _choice(ops.LT),
    ops.WHERE: _where,
    ops.CAST: lambda n, g: (g if n.args[0].type.dtype.is_float and n.type.dtype.is_float else None,),
    ops.EXPAND: lambda n, g: (unbroadcast(g, n.args[0].type, n.type),),
    ops.PART: _part,
    ops.JOIN: _join,
    ops.TURN: lambda n, g: (turn(expand(g, n.type)),),
    ops.STACK: _stack,
    ops.TAKE_ROWS: _take_rows,
    ops.REDUCE: _reduce,
    ops.LSE: lambda n, g: (mul(g, apply(ops.EXP, sub(n.args[0], n))),),
    ops.SELECT: _select,
    ops.MATMUL: _matmul,
    **dict.fromkeys((ops.FLOORDIV, ops.MOD, ops.EQ, ops.NE, ops.LT, ops.LE, ops.GT, ops.GE), _none),
    **dict.fromkeys((ops.AND, ops.OR, ops.NOT, ops.RANDOM), _none),
    **dict.fromkeys((ops.INPUT, ops.CONST, ops.COLUMN, ops.ROW), _none),
}
