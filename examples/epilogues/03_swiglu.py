"""3. SwiGLU: two column halves of one GEMM meet.

codetta check examples/epilogues/03_swiglu.py
"""

import torch.nn.functional as F

from codetta import ColVec, Tile, epilogue, halves, silu


# The weight is [gate; up], so the GEMM has 2 * N columns. `halves` gives the two as *lanes* of a pair: the kernel reads
# the weight so that gate j and up j lie in one thread, and no tile has to see another one. Columns that are no pair
# (`columns`) lie in different tiles and cannot meet. z is stored because the backward reads it.
@epilogue
def swiglu(acc: Tile["2*N"], rstd: ColVec):
    z = acc * rstd
    gate, up = halves(z)
    return dict(z=z, y=silu(gate) * up)


def swiglu_reference(acc, rstd):
    z = acc * rstd[:, None]
    gate, up = z.chunk(2, dim=1)
    return dict(z=z, y=F.silu(gate) * up)


swiglu_SIZES = {"M": 16384, "N": 2048, "K": 4096}  # 2 * N = 4096 columns behind the GEMM
