"""How each map is written in generated source: calls and operators that CuTe DSL and torch both give meaning to."""

from __future__ import annotations

import math

from codetta.core.node import Node, Op
from codetta.core.types import DType, bf16, f16, f32
from codetta.ir import ops

TEXT: dict[Op, str] = {
    ops.NEG: "-{0}",
    ops.ADD: "{0} + {1}",
    ops.SUB: "{0} - {1}",
    ops.MUL: "{0} * {1}",
    ops.DIV: "{0} / {1}",
    ops.RECIP: "1.0 / {0}",
    **{op: f"{op.name}({{0}})" for op in (ops.ABS, ops.EXP, ops.LOG, ops.TANH, ops.ERF, ops.SQRT, ops.RSQRT)},
    **{op: f"{op.name}({{0}})" for op in (ops.SIN, ops.COS, ops.SIGMOID, ops.GELU, ops.GELU_TANH)},
    **{op: f"{op.name}({{0}}, {{1}})" for op in (ops.MAXIMUM, ops.MINIMUM)},
    **{op: f"{op.name}({{0}}, {{1}})" for op in (ops.EQ, ops.NE, ops.LT, ops.LE, ops.GT, ops.GE)},
    **{op: f"{op.name}({{0}}, {{1}})" for op in (ops.AND, ops.OR)},
    ops.NOT: "logical_not({0})",
    ops.WHERE: "where({0}, {1}, {2})",
    ops.EXPAND: "{0}",
}
ROUND: dict[DType, str] = {bf16: "round_bf16({0})", f16: "round_f16({0})", f32: "{0}"}

# Zero where every argument is: what keeps a sum over a tile's padding zero.
KEEPS_ZERO = {ops.NEG, ops.ABS, ops.TANH, ops.ERF, ops.SQRT, ops.SIN, ops.SILU, ops.GELU, ops.GELU_TANH, ops.EXPAND}
# Finite where the arguments are, so that zero times it is zero.
FINITE = {*KEEPS_ZERO, ops.COS, ops.SIGMOID, ops.ADD, ops.SUB, ops.MUL, ops.MAXIMUM, ops.MINIMUM, ops.CAST}


def constant(value: object) -> str | None:
    """A constant in source; None for what is no number."""
    if isinstance(value, bool):
        return str(value)
    if not isinstance(value, int | float):
        return None
    number = float(value)
    if math.isfinite(number):
        return repr(number)
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def is_zero(n: Node) -> bool:
    """Whether a node is the number 0."""
    return n.op is ops.CONST and n.attrs[0] == 0
