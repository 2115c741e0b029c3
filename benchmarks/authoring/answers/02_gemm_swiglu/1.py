"""SwiGLU behind a GEMM whose weight is [gate; up].

acc is (M, 2 * N); its left half is the gate, its right half is up. z, the activation's input, is kept for the
backward; y is (M, N).
"""

import torch.nn.functional as F

from codetta import Tile, epilogue, halves, silu


@epilogue
def gemm_swiglu(acc: Tile["2*N"]):
    gate, up = halves(acc)
    return dict(z=acc, y=silu(gate) * up)


def gemm_swiglu_reference(acc):
    gate, up = acc.chunk(2, -1)
    return dict(z=acc, y=F.silu(gate) * up)


gemm_swiglu_SIZES = {"M": 16384, "N": 11008, "K": 4096}  # 22,016 columns behind the GEMM
