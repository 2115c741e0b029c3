"""A head's rows between its GEMMs, where forward holds exponentials of its logits, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.backends.base import FAR, LEAST, MOST, Exponentials, HeadTensors

AGAIN = 256  # rows that are computed again at once


def reference(head: HeadTensors) -> Tensor:
    """What is taken from each row's logits before the exponential: about the target's logit, and where there is no
    target so much that nothing is left of the row."""
    near = (head.x.float() * head.weight[head.targets.clamp(min=0)].float()).sum(1) * head.scale
    return torch.where(head.targets < 0, FAR, near)


def settle(
    head: HeadTensors, lse: Tensor, target: Tensor, near: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor, Exponentials]:
    """The log-sum-exp and the target's logit as they are, and what is held. They come less ``near``, where one minus a
    probability near one is no difference of large numbers. All are 0 of a row without a target.

    A row whose log-sum-exp is more than ``MOST`` above its target's logit may have overflowed: it is computed again,
    and holds the probabilities themselves."""
    for rows in (lse > MOST).nonzero()[:, 0].split(AGAIN):
        z = (head.x[rows].float() @ head.weight.float().t()) * head.scale
        whole = z.logsumexp(1)
        matrix[rows] = (z - whole[:, None]).exp().to(matrix.dtype)
        lse[rows] = whole - near[rows]
    unit = torch.where(lse > MOST, 1.0, (-lse).exp())
    found = lse + near, target + near, unit, (target - lse).exp()
    a, b, c, d = (torch.where(head.targets >= 0, t, 0.0) for t in found)
    return a, b, Exponentials(matrix, c, d)


def scale_rows(head: HeadTensors, held: Exponentials, d_lse: Tensor, d_target: Tensor, into: Tensor | None) -> Tensor:
    """The factor that takes each row of the matrix to its logits' gradient, in float32; x times that goes ``into``
    memory that is given. The target's entry is made such that the factor is right for it, too: it becomes the
    probability times ``d_lse`` plus ``d_target``, formed in float32.

    Where the gradient of the log-sum-exp is nothing beside the target's, a little is taken instead."""
    least = d_target * LEAST
    d = torch.where(d_lse.abs() < least.abs(), least, d_lse) * held.unit
    entry = torch.where(d == 0, 0.0, (held.probability.double() * d_lse + d_target).float() / d)
    rows = (head.targets >= 0).nonzero()[:, 0]
    matrix = held.matrix.data  # made anew each time: no new version for autograd
    matrix[rows, head.targets[rows].long()] = entry[rows].to(matrix.dtype)
    if into is not None:
        into.copy_(head.x.float() * (d * head.scale)[:, None])
    return d * head.scale
