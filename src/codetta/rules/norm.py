"""LayerNorm's shift through a GEMM, and the norm gain folded into a frozen weight."""

from __future__ import annotations

from codetta.core.node import Node, postorder
from codetta.core.rewrite import Registry
from codetta.core.types import DType, Kind, f16
from codetta.ir import ops
from codetta.ir.build import add, apply, cast, div, matmul, mul, sub, sum_col, sum_row, turn
from codetta.rules.match import either_way, gain, is_const, number, rebuilt, row_scaled, scale, weight, x_tile

NORM = Registry()
FROZEN = Registry()  # applied only where neither the gain nor the weight is trained
rule = NORM.rule


def _operand(n: Node) -> tuple[Node, Node] | None:
    """(x, w) of a forward GEMM whose x may be a rounded value; not float16, see scale.row_scale_leaves_matmul."""
    if n.op is not ops.MATMUL or n.attrs[0] == "tn" or n.args[0].type.dtype is f16:
        return None
    x, w = n.args
    return (x.args[0] if x.op is ops.CAST else x), w


def _column_sums(gemm: Node, w: Node, factor: Node | None) -> Node:
    """The factor (or ones) times the weight, as a RowVec over the GEMM's columns."""
    if gemm.attrs[0] == "nn":
        return sum_col(w if factor is None else mul(w, turn(factor)))
    return turn(sum_row(w if factor is None else mul(w, factor)))


@rule(
    "(x - mu) g w = x g w - mu (g w), mu one number per row",
    lambda: matmul(mul(sub(x_tile(), scale()), gain()), weight()),
)
def row_shift_leaves_matmul(n: Node) -> Node | None:
    """Delay LayerNorm's mean to the epilogue as a rank-1 correction; w g is a vector made once per step."""
    if (found := _operand(n)) is None:
        return None
    x, w = found
    for shifted, g in [*either_way(x, ops.MUL), (x, None)]:
        if g is not None and g.type.kind is not Kind.ROWVEC:
            continue
        if (
            shifted.op is ops.SUB
            and shifted.args[1].type.kind is Kind.COLVEC
            and shifted.args[0].type.kind is Kind.TILE
        ):
            y, mu = shifted.args
            kept = y if g is None else mul(y, g)
            return sub(rebuilt(n, cast(kept, n.args[0].type.dtype), w), mul(mu, _column_sums(n, w, g)))
    return None


@rule(
    "(x + b) w = x w + b w, b one number per column", lambda: matmul(add(mul(x_tile(), scale()), gain("b")), weight())
)
def column_shift_leaves_matmul(n: Node) -> Node | None:
    """A norm's bias behind its row scale: it must leave for the scale to leave."""
    if (found := _operand(n)) is None:
        return None
    x, w = found
    for y, b in either_way(x, ops.ADD):
        if b.type.kind is Kind.ROWVEC and row_scaled(y) is not None:
            return add(rebuilt(n, cast(y, n.args[0].type.dtype), w), _column_sums(n, w, b))
    return None


def _centred() -> Node:
    x = matmul(x_tile(), weight())
    d = sub(x, mul(sum_row(x), 1 / 18))
    return sum_row(mul(d, d))


@rule("sum((x - mean)^2) = sum(x^2) - n mean^2", _centred)
def variance_in_one_pass(n: Node) -> Node | None:
    """Both sums are partials of one epilogue; they are float32 from the first product. What no GEMM produces is summed
    in two passes, which a leftover has at no cost and which lose nothing where the mean is far from zero."""
    if n.op is not ops.REDUCE or n.attrs[:2] != ("sum", Kind.COLVEC) or n.args[0].op is not ops.MUL:
        return None
    d, same = n.args[0].args
    if d is not same or d.op is not ops.SUB:
        return None
    x, mean = d.args
    from_gemm = any(m.op is ops.MATMUL for m in postorder([x]))
    if from_gemm and x.type.kind is Kind.TILE and isinstance(x.type.cols, int) and _is_mean(mean, x):
        # where all of a row is nearly the same, rounding may leave less than nothing, whose root is NaN
        return apply(ops.MAXIMUM, sub(sum_row(mul(x, x)), mul(mul(mean, mean), float(x.type.cols))), 0.0)
    return None


def _is_mean(mean: Node, x: Node) -> bool:
    total, cols = sum_row(x), x.type.cols
    if mean.op is ops.MUL and is_const(mean.args[1]) and isinstance(cols, int):
        return mean.args[0] is total and abs(number(mean.args[1]) * cols - 1) < 1e-12
    return mean is div(total, cols) if isinstance(cols, int) else False


@FROZEN.rule("(x g) w = x (g w)", lambda: matmul(mul(x_tile(), gain()), weight()))
def gain_into_frozen_weight(n: Node) -> Node | None:
    """The stored value then is the residual itself; worth it only where the scaled weight is made once."""
    if (found := _operand(n)) is None:
        return None
    x, w = found
    for y, g in either_way(x, ops.MUL):
        if g.type.kind is Kind.ROWVEC and y.type.kind is Kind.TILE and w.op is ops.INPUT and g.op is ops.INPUT:
            factor = g if n.attrs[0] == "nt" else turn(g)
            return rebuilt(n, cast(y, n.args[0].type.dtype), cast(mul(w, factor), w.type.dtype))
    return None


def rounded_before_gain(n: Node) -> DType | None:
    """The narrow dtype to which a model rounds its normalised rows before it multiplies them by the gain ``n`` has, as
    Llama's norm does; else None. Here arithmetic takes what was not rounded (canon.round_before_arithmetic)."""
    for h, g in either_way(n, ops.MUL):
        of_columns = g.type.kind is Kind.ROWVEC and h.op is ops.CAST and h.type.dtype.is_float
        if of_columns and h.type.dtype.bytes < h.args[0].type.dtype.bytes and row_scaled(h.args[0]) is not None:
            return h.type.dtype
    return None
