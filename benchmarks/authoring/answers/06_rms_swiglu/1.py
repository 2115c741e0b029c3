"""RMSNorm's row scale and SwiGLU behind a GEMM whose weight is [gate; up].

acc is (M, 2 * N), gate on the left and up on the right, of a gained, unscaled input; rstd is (M,), known before the
GEMM starts. z, scaled, is kept for the backward; y is (M, N).
"""

import torch.nn.functional as F

from codetta import ColVec, Tile, epilogue, halves, silu


@epilogue
def rms_swiglu(acc: Tile["2*N"], rstd: ColVec):
    z = acc * rstd
    gate, up = halves(z)
    return dict(z=z, y=silu(gate) * up)


def rms_swiglu_reference(acc, rstd):
    z = acc * rstd[:, None]
    gate, up = z.chunk(2, -1)
    return dict(z=z, y=F.silu(gate) * up)


rms_swiglu_SIZES = {"M": 16384, "N": 11008, "K": 4096}  # 22,016 columns behind the GEMM
