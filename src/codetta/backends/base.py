"""What a backend is: it turns a Plan into an executable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from codetta.partition.plan import Plan


class Runnable(Protocol):
    """A plan ready to run."""

    def run(self, inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """The output buffers by name, from the inputs by name and the token count. Each output is contiguous memory
        of its own; inputs are never modified."""
        ...


class Backend(Protocol):
    """Makes plans ready to run."""

    def __call__(self, plan: Plan, *, batch_invariant: bool = False) -> Runnable:
        """``batch_invariant``: the bits of a row do not depend on how many rows there are."""
        ...
