"""RMSNorm's row scale and rotary position embedding behind a GEMM.

acc is (M, 4096): 32 heads of 128 columns, of a gained, unscaled input. rstd is (M,), known before the GEMM starts.
cos and sin are (M, 128), the same for every head; column j and column j + 64 of a head are turned together.
"""

import torch

from codetta import ColVec, Table, Tile, epilogue, halves, join_halves

HEADS, HEAD = 32, 128


@epilogue
def rms_rope(acc: Tile[4096], rstd: ColVec, cos: Table[128], sin: Table[128]):
    left, right = halves(acc * rstd, groups=HEADS)
    cos_left, cos_right = halves(cos)
    sin_left, sin_right = halves(sin)
    q = join_halves(left * cos_left - right * sin_left, right * cos_right + left * sin_right, groups=HEADS)
    return dict(q=q)


def rms_rope_reference(acc, rstd, cos, sin):
    x = (acc * rstd[:, None]).unflatten(1, (HEADS, HEAD))
    left, right = x.chunk(2, -1)
    turned = torch.cat([-right, left], -1)
    return dict(q=(x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).flatten(1))


rms_rope_SIZES = {"M": 16384, "K": 4096}
