"""1. Bias and GELU: the smallest useful epilogue.

codetta check examples/epilogues/01_bias_gelu.py
"""

import torch.nn.functional as F

from codetta import RowVec, Tile, epilogue, gelu


# `acc` is x @ w.T, one tile of it, in registers. A RowVec has one number per column and broadcasts down the rows.
# What is returned is stored. Nothing else touches memory: here the bias is read and y is written.
@epilogue
def bias_gelu(acc: Tile, bias: RowVec):
    return dict(y=gelu(acc + bias))


# The same in plain PyTorch, with the same names in and out. `codetta check` compares the two in float64.
def bias_gelu_reference(acc, bias):
    return dict(y=F.gelu(acc + bias))


bias_gelu_SIZES = {"M": 16384, "N": 4096, "K": 4096}
