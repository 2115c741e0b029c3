"""A row scale leaves a GEMM: diag(r) x w = diag(r) (x w). It gathers outermost in a product first."""

from __future__ import annotations

from codetta.core.node import Node
from codetta.core.rewrite import Registry
from codetta.core.types import Kind, f16
from codetta.ir import ops
from codetta.ir.build import cast, join, matmul, mul, neg
from codetta.ir.split import halves
from codetta.rules.match import either_way, gain, is_const, rebuilt, row_scaled, scale, weight, x_tile

SCALE = Registry()
THROUGH = Registry()  # through a GEMM: forward only; backward the scaled gradient is stored for the weights anyway
rule = SCALE.rule


@rule("(x r) g = (x g) r for one number r per row", lambda: mul(mul(x_tile(), scale()), gain()))
def row_scale_outermost(n: Node) -> Node | None:
    """So that the next rules find it; two row scales become one vector."""
    if n.op is not ops.MUL:
        return None
    for scaled, other in either_way(n, ops.MUL):
        if (found := row_scaled(scaled)) is None:
            continue
        x, r = found
        if other.type.kind in (Kind.COLVEC, Kind.SCALAR) and not is_const(other):
            return mul(x, mul(r, other))
        # not past another Tile: a value that is stored scaled would lose its name
        if other.type.kind in (Kind.ROWVEC, Kind.TABLE, Kind.SCALAR, Kind.GROUPVEC):
            return mul(mul(x, other), r)
    return None


@rule("-(x r) = (-x) r", lambda: neg(mul(x_tile(), scale())))
def row_scale_leaves_sign(n: Node) -> Node | None:
    """A sign goes with the tile."""
    if n.op is ops.NEG and (found := row_scaled(n.args[0])) is not None:
        return mul(neg(found[0]), found[1])
    return None


@rule("join(x r, y r) = join(x, y) r", lambda: join(halves(), mul(x_tile(), scale()), mul(x_tile("y"), scale())))
def row_scale_leaves_join(n: Node) -> Node | None:
    """Where every part has the same row scale."""
    if n.op is not ops.JOIN:
        return None
    found = [row_scaled(a) for a in n.args if not is_const(a)]
    scales = {f[1] if f is not None else None for f in found}
    if len(scales) != 1 or (r := scales.pop()) is None:
        return None
    tiles = iter([f[0] for f in found if f is not None])
    return mul(rebuilt(n, *(a if is_const(a) else next(tiles) for a in n.args)), r)


@THROUGH.rule("(x r) w = (x w) r", lambda: matmul(mul(x_tile(), scale()), weight()))
def row_scale_leaves_matmul(n: Node) -> Node | None:
    """Delay a row scale (RMSNorm's 1/rms) until the GEMM's epilogue.

    Not for float16: the product without the scale is stored and may overflow where eager's does not."""
    if n.op is not ops.MATMUL or n.attrs[0] == "tn":
        return None
    x, w = n.args
    inner = x.args[0] if x.op is ops.CAST else x
    found = row_scaled(inner)
    if found is None or x.type.dtype is f16:
        return None
    return mul(rebuilt(n, cast(found[0], x.type.dtype), w), found[1])
