"""ATen's elementwise operators as nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from codetta.capture.align import Value
from codetta.capture.scope import Meaning, Pair, Scope
from codetta.capture.sources import CASTS, fake
from codetta.core.node import Node, Op
from codetta.core.types import boolean
from codetta.errors import UnsupportedError
from codetta.ir import ops
from codetta.ir.build import add, apply, cast, div, mul, neg, sub, where

aten = torch.ops.aten
Rule = Callable[..., Meaning]


def _unary(op: Op) -> Rule:
    return lambda s, x: s.combine(partial(apply, op), x)


def _binary(op: Op) -> Rule:
    return lambda s, a, b: s.combine(partial(apply, op), a, b)


def _add(s: Scope, a: Any, b: Any, alpha: float) -> Value:
    return s.combine(lambda x, y: add(x, y if alpha == 1 else mul(y, alpha)), a, b)


def _sub(s: Scope, a: Any, b: Any, alpha: float) -> Value:
    return s.combine(lambda x, y: sub(x, y if alpha == 1 else mul(y, alpha)), a, b)


def _mul(s: Scope, a: Any, b: Any) -> Meaning:
    if not fake(s.node).is_complex():
        return s.combine(mul, a, b)
    lanes = (*s.complex_lanes(a), *s.complex_lanes(b))
    real = s.combine(lambda ar, ai, br, bi: sub(mul(ar, br), mul(ai, bi)), *lanes)
    imag = s.combine(lambda ar, ai, br, bi: add(mul(ar, bi), mul(ai, br)), *lanes)
    return Pair(real, imag)


_POWERS: dict[float, Callable[[Node], Node]] = {
    2: lambda x: mul(x, x),
    3: lambda x: mul(mul(x, x), x),
    4: lambda x: mul(mul(x, x), mul(x, x)),
    0.5: partial(apply, ops.SQRT),
    -0.5: partial(apply, ops.RSQRT),
    -1: partial(apply, ops.RECIP),
    -2: lambda x: apply(ops.RECIP, mul(x, x)),
}


def _pow(s: Scope, x: Any, exponent: Any) -> Value:
    if not isinstance(exponent, (int, float)) or exponent not in _POWERS:
        raise UnsupportedError(f"the power {exponent}")
    return s.combine(_POWERS[exponent], x)


def _gelu(s: Scope, x: Any, approximate: str) -> Value:
    return s.combine(partial(apply, ops.GELU if approximate == "none" else ops.GELU_TANH), x)


def _relu(x: Node) -> Node:
    """0 where x <= 0: unlike a maximum, its derivative at 0 is 0 and it keeps NaN, both as PyTorch does."""
    return where(apply(ops.LE, x, 0.0), 0.0, x)


def _clamp(s: Scope, x: Any, low: Any = None, high: Any = None) -> Value:
    """x where it is within the bounds. A bound passes no gradient on, but the value at the bound does, as PyTorch's."""

    def clamped(v: Node) -> Node:
        v = v if low is None else where(apply(ops.LT, v, low), low, v)
        return v if high is None else where(apply(ops.GT, v, high), high, v)

    if not all(b is None or isinstance(b, (int, float)) for b in (low, high)):
        raise UnsupportedError("clamp with a bound that is not a fixed number")
    return s.combine(clamped, x)


def _masked_fill(s: Scope, x: Any, mask: Any, value: Any) -> Value:
    return s.combine(lambda a, m, v: where(m, v, a), x, mask, value)


def _cast(s: Scope, x: Any, *_: Any) -> Value:
    """A cast between floats. What the result's dtype is, the graph says."""
    if fake(s.node).device != fake(x).device:
        raise UnsupportedError("a copy to another device")
    if not (s.dtype.is_float and (fake(x).is_floating_point() or fake(x).dtype is torch.bool)):
        raise UnsupportedError(f"a cast from {fake(x).dtype} to {s.dtype}")
    return s.combine(lambda v: _to(v, s), x)


def _to(v: Node, s: Scope) -> Node:
    return where(v, 1.0, 0.0) if v.type.dtype is boolean else cast(v, s.dtype)


def _reversed_sub(s: Scope, a: Any, b: Any, alpha: float) -> Value:
    return _sub(s, b, a, alpha)


def _not(s: Scope, x: Any) -> Value:
    return s.combine(partial(apply, ops.NOT), x)


_SAME_NAME = {
    ops.ABS: "abs",
    ops.EXP: "exp",
    ops.LOG: "log",
    ops.TANH: "tanh",
    ops.ERF: "erf",
    ops.SQRT: "sqrt",
    ops.RSQRT: "rsqrt",
    ops.SIN: "sin",
    ops.COS: "cos",
    ops.SIGMOID: "sigmoid",
    ops.SILU: "silu",
}
_COMPARISONS = {ops.EQ: "eq", ops.NE: "ne", ops.LT: "lt", ops.LE: "le", ops.GT: "gt", ops.GE: "ge"}

MAPS: dict[Any, Rule] = {
    **{getattr(aten, name).default: _unary(op) for op, name in _SAME_NAME.items()},
    **{getattr(getattr(aten, n), v): _binary(op) for op, n in _COMPARISONS.items() for v in ("Tensor", "Scalar")},
    aten.neg.default: lambda s, x: s.combine(neg, x),
    aten.reciprocal.default: _unary(ops.RECIP),
    aten.square.default: lambda s, x: s.combine(_POWERS[2], x),
    aten.pow.Tensor_Scalar: _pow,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: _reversed_sub,
    aten.rsub.Tensor: _reversed_sub,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: lambda s, a, b: s.combine(div, a, b),
    aten.div.Scalar: lambda s, a, b: s.combine(div, a, b),
    aten.maximum.default: _binary(ops.MAXIMUM),
    aten.minimum.default: _binary(ops.MINIMUM),
    aten.relu.default: lambda s, x: s.combine(_relu, x),
    aten.gelu.default: _gelu,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda s, x, high: _clamp(s, x, None, high),
    aten.where.self: lambda s, c, a, b: s.combine(where, c, a, b),
    aten.where.Scalar: lambda s, c, a, b: s.combine(where, c, a, b),
    aten.where.ScalarSelf: lambda s, c, a, b: s.combine(where, c, a, b),
    aten.where.ScalarOther: lambda s, c, a, b: s.combine(where, c, a, b),
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.logical_and.default: _binary(ops.AND),
    aten.logical_or.default: _binary(ops.OR),
    aten.logical_not.default: _not,
    aten.bitwise_and.Tensor: _binary(ops.AND),
    aten.bitwise_or.Tensor: _binary(ops.OR),
    aten.bitwise_not.default: _not,
    aten.__and__.Tensor: _binary(ops.AND),
    aten.__or__.Tensor: _binary(ops.OR),
    **dict.fromkeys(CASTS, _cast),
}
