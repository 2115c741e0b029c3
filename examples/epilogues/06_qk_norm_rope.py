"""6. QK-norm and RoPE behind one q, k, v projection: reductions inside a head, ranges of columns.

codetta check examples/epilogues/06_qk_norm_rope.py
"""

import torch

from codetta import RowVec, Table, Tile, columns, epilogue, halves, join_halves, rsqrt, sum_inside

HEADS, KV_HEADS, HEAD = 16, 8, 128
Q, KV = HEADS * HEAD, KV_HEADS * HEAD  # 2048 columns of q, 1024 of k, 1024 of v
EPS = 1e-6


# A sum over a whole row crosses tiles, but a head lies inside one tile: `sum_inside` is known at once, and its result
# (a GroupVec, one number per row and head) may be used right here.
def normed(x, gain, heads):
    return x * rsqrt(sum_inside(x * x, groups=heads) / HEAD + EPS) * gain


def turned(x, cos, sin, heads):
    left, right = halves(x, groups=heads)
    return join_halves(left * cos - right * sin, right * cos + left * sin, groups=heads)


# `columns` gives neighbouring ranges. They lie in different tiles: each may be changed and stored, or joined again in
# place, but q may not meet k. Functions like the two above are ordinary Python: they are called while tracing.
@epilogue
def qk_norm_rope(
    acc: Tile[Q + 2 * KV], q_gain: RowVec[Q], k_gain: RowVec[KV], cos: Table[HEAD // 2], sin: Table[HEAD // 2]
):
    q, k, v = columns(acc, Q, KV, KV)
    q = turned(normed(q, q_gain, HEADS), cos, sin, HEADS)
    k = turned(normed(k, k_gain, KV_HEADS), cos, sin, KV_HEADS)
    return dict(q=q, k=k, v=v)


def qk_norm_rope_reference(acc, q_gain, k_gain, cos, sin):
    def one(x, gain, heads):
        x = x.unflatten(1, (heads, HEAD))
        x = x / (x.square().mean(2, keepdim=True) + EPS).sqrt() * gain.unflatten(0, (heads, HEAD))
        a, b = x.chunk(2, dim=2)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], dim=2).flatten(1)

    q, k, v = acc.split([Q, KV, KV], dim=1)
    return dict(q=one(q, q_gain, HEADS), k=one(k, k_gain, KV_HEADS), v=v)


qk_norm_rope_SIZES = {"M": 16384, "K": 4096}
