"""The tensors that all contenders read, and the proof that none of them wrote there.

A kernel that works in place on an input, or on an incoming gradient, is right when it is called first and spoils the
inputs of whoever comes next. Such a contender gets copies of its own; that the others need none is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from codetta.errors import VerifyError

Tensors = dict[str, Tensor]


class Shared:
    """Named tensors, and copies of what they held."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.kept = copies(tensors)

    def restore(self) -> list[str]:
        """The names of those that do not hold what they held; they do again behind this call."""
        spoiled = [n for n, t in self.tensors.items() if not _same(t, self.kept[n])]
        with torch.no_grad():
            for name in spoiled:
                self.tensors[name].copy_(self.kept[name])
        return spoiled

    def prove_unwritten(self, contender: str) -> None:
        """VerifyError with the contender's name if it wrote to any of them; the next one finds them as they were."""
        spoiled = self.restore()
        if spoiled:
            raise VerifyError(f"{contender} wrote over {', '.join(spoiled)}, which other contenders read too")


def copies(tensors: Mapping[str, Tensor]) -> Tensors:
    """The same numbers in other memory, leaves that require a gradient where those did."""
    return {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit: NaN is like itself."""
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))
