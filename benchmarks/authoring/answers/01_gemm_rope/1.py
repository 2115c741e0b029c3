"""Rotary position embedding behind a GEMM.

acc is (M, 4096): 32 heads of 128 columns. cos and sin are (M, 128), the same for every head; column j and column j
+ 64 of a head are turned together. The result is (M, 4096).
"""

import torch

from codetta import Table, Tile, epilogue, halves, join_halves

HEADS, HEAD = 32, 128


@epilogue
def gemm_rope(acc: Tile[4096], cos: Table[128], sin: Table[128]):
    left, right = halves(acc, groups=HEADS)
    cos_left, cos_right = halves(cos)
    sin_left, sin_right = halves(sin)
    return dict(
        q=join_halves(
            left * cos_left - right * sin_left,
            right * cos_right + left * sin_right,
            groups=HEADS,
        )
    )


def gemm_rope_reference(acc, cos, sin):
    x = acc.unflatten(1, (HEADS, HEAD))
    left, right = x.chunk(2, -1)
    turned = torch.cat([-right, left], -1)
    return dict(q=(x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).flatten(1))


gemm_rope_SIZES = {"M": 16384, "K": 4096}
