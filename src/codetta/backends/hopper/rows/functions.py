"""Functions that generated kernels call: Triton has none of these, or one that is less exact.

They are bound twice, for the GPU and for Triton's interpreter (``source.py``), so nothing here is decorated. Types are
Triton's own and are not checked.
"""

from __future__ import annotations

import triton.language as tl


def exp(x: tl.tensor) -> tl.tensor:
    """e^x to 2 units in float32's last place: the error of x log2(e) is put back, which ex2.approx(x log2 e) loses."""
    log2e = 1.4426950408889634
    t = x * log2e
    low = tl.fma(x, log2e, -t) + x * 1.925963033500975e-08
    return tl.exp2(t) * tl.fma(tl.where(tl.abs(x) < 200.0, low, 0.0), 0.6931471805599453, 1.0)


def exp_of_rounded(x: tl.tensor) -> tl.tensor:
    """e^x where x itself hangs on a number of 16 bits: an error of 2^-24 |x| is nothing beside that one's rounding."""
    return tl.exp2(x * 1.4426950408889634)


def exp_less(x: tl.tensor, m: tl.tensor) -> tl.tensor:
    """e^(x - m) where m is the largest x, times a factor that hangs on m alone (``log_of_sum``): the product is exact
    until m log2(e), which is rounded once a row, is taken from it."""
    log2e = 1.4426950408889634
    return tl.exp2(tl.fma(x, log2e, -(m * log2e)))


def carried(old: tl.tensor, m: tl.tensor) -> tl.tensor:
    """What takes a sum of ``exp_less`` under the maximum ``old`` to one under ``m``: exactly 1 where they are the same,
    since what was rounded of either is the same then."""
    log2e = 1.4426950408889634
    at = finite(old)
    return tl.exp2(tl.fma(old, log2e, -(m * log2e)) - tl.fma(at, log2e, -(at * log2e)))


def log_of_sum(m: tl.tensor, s: tl.tensor) -> tl.tensor:
    """The log-sum-exp from the maximum and the sum of ``exp_less``, without that one's factor."""
    log2e = 1.4426950408889634
    at = finite(m)
    return at + (tl.log(s) - tl.fma(at, log2e, -(at * log2e)) * 0.6931471805599453)


def exp_less64(x: tl.tensor, m: tl.tensor) -> tl.tensor:
    """``exp_less`` in float64, where the factor is 1."""
    return tl.exp(x - m)


def carried64(old: tl.tensor, m: tl.tensor) -> tl.tensor:
    """``carried`` in float64."""
    return tl.exp(old - m)


def log_of_sum64(m: tl.tensor, s: tl.tensor) -> tl.tensor:
    """``log_of_sum`` in float64."""
    return tl.log(s) + finite(m)


def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + e^-x): e^-x may be infinite, then this is 0."""
    return 1.0 / (1.0 + exp(-x))


def silu(x: tl.tensor) -> tl.tensor:
    """x / (1 + e^-x)."""
    return x / (1.0 + exp(-x))


def gelu(x: tl.tensor) -> tl.tensor:
    """x Phi(x)."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


def gelu_tanh(x: tl.tensor) -> tl.tensor:
    """0.5 x (1 + tanh u) as x sigmoid(2 u), which neither overflows nor cancels."""
    return x / (1.0 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


def tanh(x: tl.tensor) -> tl.tensor:
    """(1 - t) / (1 + t) with t = e^-2|x|; near 0, where that cancels, the polynomial of Cephes' tanhf."""
    t = exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = (p * z - 5.37397155531e-2) * z + 1.33314422036e-1
    near = (p * z - 3.33332819422e-1) * z * x + x
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


def tanh64(x: tl.tensor) -> tl.tensor:
    """``tanh`` in float64, near 0 by its series."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    z = x * x
    near = x + x * z * (z * (2.0 / 15.0 + z * (-17.0 / 315.0 + z * (62.0 / 2835.0))) - 1.0 / 3.0)
    return tl.where(tl.abs(x) < 0.02, near, tl.where(x < 0.0, -far, far))


def sigmoid64(x: tl.tensor) -> tl.tensor:
    """``sigmoid`` in float64."""
    return 1.0 / (1.0 + tl.exp(-x))


def silu64(x: tl.tensor) -> tl.tensor:
    """``silu`` in float64."""
    return x / (1.0 + tl.exp(-x))


def gelu_tanh64(x: tl.tensor) -> tl.tensor:
    """``gelu_tanh`` in float64."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


def floordiv(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The quotient rounded down, as in Python; Triton rounds towards 0."""
    q = a // b
    return tl.where((q * b != a) & ((a < 0) != (b < 0)), q - 1, q)


def mod(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The remainder with the divisor's sign."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


def maximum(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The larger; NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def minimum(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The smaller; NaN where one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


def larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The combination of a reduction to the maximum."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def finite(x: tl.tensor) -> tl.tensor:
    """0 for an infinity: what may be subtracted before an exponential."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


def uniform(seed: tl.tensor, row: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Counter-based uniform numbers in [0, 1), bit for bit those of the reference: MurmurHash3's finaliser."""
    h = _mixed(seed.to(tl.uint32) * 0x9E3779B1 + 0x9E3779B9)
    h = _mixed(h + row.to(tl.uint32) * 0x9E3779B1)
    h = _mixed(h + column.to(tl.uint32) * 0x9E3779B1)
    return (h >> 8).to(tl.float32) * 5.9604644775390625e-08


def _mixed(h: tl.tensor) -> tl.tensor:
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


FUNCTIONS = (
    exp,
    exp_of_rounded,
    exp_less,
    carried,
    log_of_sum,
    exp_less64,
    carried64,
    log_of_sum64,
    sigmoid,
    silu,
    gelu,
    gelu_tanh,
    tanh,
    tanh64,
    sigmoid64,
    silu64,
    gelu_tanh64,
    floordiv,
    mod,
    maximum,
    minimum,
    larger,
    finite,
    uniform,
    _mixed,
)
