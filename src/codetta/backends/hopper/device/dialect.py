"""What the names in generated source mean in CuTe DSL."""

from __future__ import annotations

import math
from typing import Any

from codetta.backends.hopper import toolchain  # noqa: F401  prepares what the next imports read

# isort: split
import cutlass
from cutlass import cute
from quack.epilogue.math import pack

LOG2_E = 1.4426950408889634


def exp(x: Any) -> Any:
    """2^(x log2 e), by the one instruction that there is: the rounding of x log2(e) is 2^-24 |x| of the value, which is
    less than that of what x came from, an accumulator's."""
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def sigmoid(x: Any) -> Any:
    """1 / (1 + 2^(-x log2 e)): right at any x, to a few units in float32's last place."""
    return cute.arch.rcp_approx(1.0 + exp(-x))


def gelu(x: Any) -> Any:
    """x Phi(x)."""
    return 0.5 * x * (1.0 + cute.math.erf(x * 0.7071067811865476))


def gelu_tanh(x: Any) -> Any:
    """0.5 x (1 + tanh(u)) as x sigmoid(2 u), which neither overflows nor cancels; spelt as its derivative spells it, so
    that a backward that needs both has one sigmoid."""
    return x * sigmoid(x * 1.5957691216057308 * (1.0 + x * x * 0.044715))


def round_bf16(x: Any) -> Any:
    """To the nearest bf16, as the store does."""
    return x.to(cutlass.BFloat16).to(cutlass.Float32)


def round_f16(x: Any) -> Any:
    """To the nearest f16."""
    return x.to(cutlass.Float16).to(cutlass.Float32)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a or b, both computed."""
    return cutlass.select_(condition, _value(a), _value(b))


def _value(x: Any) -> Any:
    return cutlass.Float32(x) if isinstance(x, int | float) else x


def maximum(a: Any, b: Any) -> Any:
    """The larger; NaN where one is, as in torch."""
    a, b = _value(a), _value(b)
    return cutlass.select_(a <= b, b, cutlass.select_(b == b, a, b))  # noqa: PLR0124  b == b: b is no NaN


def minimum(a: Any, b: Any) -> Any:
    """The smaller; NaN where one is."""
    a, b = _value(a), _value(b)
    return cutlass.select_(a >= b, b, cutlass.select_(b == b, a, b))  # noqa: PLR0124


NAMES: dict[str, Any] = {
    "abs": lambda x: cutlass.select_(x < 0.0, -x, x),
    "exp": exp,
    "log": cute.math.log,
    "tanh": cute.math.tanh,
    "erf": cute.math.erf,
    "sqrt": cute.math.sqrt,
    "rsqrt": cute.math.rsqrt,
    "sin": cute.math.sin,
    "cos": cute.math.cos,
    "sigmoid": sigmoid,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "maximum": maximum,
    "minimum": minimum,
    "where": where,
    "eq": lambda a, b: _value(a) == b,
    "ne": lambda a, b: _value(a) != b,
    "lt": lambda a, b: _value(a) < b,
    "le": lambda a, b: _value(a) <= b,
    "gt": lambda a, b: _value(a) > b,
    "ge": lambda a, b: _value(a) >= b,
    "logical_and": lambda a, b: a & b,
    "logical_or": lambda a, b: a | b,
    "logical_not": lambda a: cutlass.select_(a, cutlass.Boolean(False), cutlass.Boolean(True)),
    "round_bf16": round_bf16,
    "round_f16": round_f16,
    "pack": pack,
    "inf": math.inf,
    "nan": math.nan,
}
