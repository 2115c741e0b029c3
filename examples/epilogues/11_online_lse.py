"""11. Online log-sum-exp and the target's logit: cross-entropy without a pass over the logits.

codetta check examples/epilogues/11_online_lse.py
"""

import torch

from codetta import ColVec, Tile, epilogue, finalize, i64, logsumexp_row, select_column


# `logsumexp_row` keeps a running maximum and sum per tile; the partials are folded afterwards, so that nothing
# overflows. `select_column` writes the element of each row that an integer vector names, by the tile that holds it.
# The logits are stored too: the backward takes exp(logits - lse) of them. Leave them out if nothing reads them.
@epilogue
def online_lse(acc: Tile, target: ColVec[i64]):
    return dict(logits=acc, lse=logsumexp_row(acc), picked=select_column(acc, target))


def online_lse_reference(acc, target):
    return dict(logits=acc, lse=acc.logsumexp(1), picked=torch.gather(acc, 1, target[:, None])[:, 0])


# The loss of each token is a finalize on the two statistics; -100 marks tokens that do not count.
@finalize
def token_loss(lse: ColVec, picked: ColVec):
    return dict(loss=lse - picked)


def token_loss_reference(lse, picked):
    return dict(loss=lse - picked)


online_lse_SIZES = {"M": 16384, "N": 4096, "K": 4096}
token_loss_SIZES = {"M": 16384}
