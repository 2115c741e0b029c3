"""The text of every elementwise op: what a generated kernel writes for it."""

from __future__ import annotations

from codetta.core.node import Op
from codetta.core.types import DType, bf16, boolean, f16, f32, f64, i32, i64
from codetta.ir import ops

TRITON: dict[DType, str] = {
    f64: "tl.float64",
    f32: "tl.float32",
    bf16: "tl.bfloat16",
    f16: "tl.float16",
    i64: "tl.int64",
    i32: "tl.int32",
    boolean: "tl.int1",
}

# Arguments have been widened to the compute dtype. A second text is float64's, where that differs.
MAPS: dict[Op, tuple[str, ...]] = {
    ops.NEG: ("-{}",),
    ops.ABS: ("tl.abs({})",),
    ops.EXP: ("exp({})", "tl.exp({})"),
    ops.LOG: ("tl.log({})",),
    ops.TANH: ("tanh({})", "tanh64({})"),
    ops.ERF: ("tl.erf({})",),
    ops.SQRT: ("tl.sqrt_rn({})", "tl.sqrt({})"),
    ops.RSQRT: ("tl.rsqrt({})",),
    ops.RECIP: ("tl.div_rn(1.0, {})", "1.0 / {}"),
    ops.SIN: ("tl.sin({})",),
    ops.COS: ("tl.cos({})",),
    ops.SIGMOID: ("sigmoid({})", "sigmoid64({})"),
    ops.SILU: ("silu({})", "silu64({})"),
    ops.GELU: ("gelu({})",),
    ops.GELU_TANH: ("gelu_tanh({})", "gelu_tanh64({})"),
    ops.ADD: ("{} + {}",),
    ops.SUB: ("{} - {}",),
    ops.MUL: ("{} * {}",),
    ops.DIV: ("tl.div_rn({}, {})", "{} / {}"),
    ops.MAXIMUM: ("maximum({}, {})",),
    ops.MINIMUM: ("minimum({}, {})",),
    ops.FLOORDIV: ("floordiv({}, {})",),
    ops.MOD: ("mod({}, {})",),
    ops.EQ: ("{} == {}",),
    ops.NE: ("{} != {}",),
    ops.LT: ("{} < {}",),
    ops.LE: ("{} <= {}",),
    ops.GT: ("{} > {}",),
    ops.GE: ("{} >= {}",),
    ops.AND: ("{} & {}",),
    ops.OR: ("{} | {}",),
    ops.NOT: ("{} == 0",),
    ops.WHERE: ("tl.where({}, {}, {})",),
    ops.RANDOM: ("uniform({}, {}, {})",),
}


def map_text(op: Op, dtype: DType, args: list[str]) -> str:
    """The op applied to arguments of that compute dtype."""
    texts = MAPS[op]
    return texts[-1 if dtype is f64 else 0].format(*args)


def number_text(value: object) -> str:
    """A Python number in a kernel's source."""
    if isinstance(value, float) and value - value != 0.0:
        return f'float("{value}")'
    return repr(value)
