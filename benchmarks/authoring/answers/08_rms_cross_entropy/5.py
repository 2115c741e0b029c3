"""RMSNorm's row scale and cross-entropy's row statistics behind the GEMM of a language model's head.

acc is (M, N), of a gained, unscaled input; rstd is (M,), known before the GEMM starts; target is (M,), the column
of each row's label. The logits are scaled; lse and picked are (M,), of the scaled ones.
"""

import torch

from codetta import ColVec, Tile, epilogue, i32, logsumexp_row, select_column


@epilogue
def rms_cross_entropy(acc: Tile, rstd: ColVec, target: ColVec[i32]):
    logits = acc * rstd
    return dict(logits=logits, lse=logsumexp_row(acc * rstd), picked=select_column(acc, target) * rstd)


def rms_cross_entropy_reference(acc, rstd, target):
    logits = acc * rstd[:, None]
    picked = torch.gather(logits, 1, target[:, None])[:, 0]
    return dict(logits=logits, lse=torch.logsumexp(logits, 1), picked=picked)


rms_cross_entropy_SIZES = {"M": 16384, "N": 32768, "K": 4096}
