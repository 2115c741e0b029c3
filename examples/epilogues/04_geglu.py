"""4. GeGLU: the same pair with another gate, and nothing kept for a backward pass.

codetta check examples/epilogues/04_geglu.py
"""

import torch.nn.functional as F

from codetta import Tile, epilogue, gelu_tanh, halves


# `gelu_tanh` is PyTorch's approximate="tanh"; `gelu` is the exact one, by erf. z is not stored, so a third is written
# of what example 3 writes. For training nothing is missing: `geglu.vjp()` also gives a forward that stores z.
@epilogue
def geglu(acc: Tile["2*N"]):
    gate, up = halves(acc)
    return dict(y=gelu_tanh(gate) * up)


def geglu_reference(acc):
    gate, up = acc.chunk(2, dim=1)
    return dict(y=F.gelu(gate, approximate="tanh") * up)


geglu_SIZES = {"M": 16384, "N": 2048, "K": 4096}  # 2 * N = 4096 columns behind the GEMM
