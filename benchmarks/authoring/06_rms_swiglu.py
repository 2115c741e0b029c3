"""RMSNorm's row scale and SwiGLU behind a GEMM whose weight is [gate; up].

acc is (M, 2 * N), gate on the left and up on the right, of a gained, unscaled input; rstd is (M,), known before the
GEMM starts. z, scaled, is kept for the backward; y is (M, N).
"""

import torch.nn.functional as F


def rms_swiglu_reference(acc, rstd):
    z = acc * rstd[:, None]
    gate, up = z.chunk(2, -1)
    return dict(z=z, y=F.silu(gate) * up)


rms_swiglu_SIZES = {"M": 16384, "N": 11008, "K": 4096}  # 22,016 columns behind the GEMM
