"""What a backend is: it turns a Plan into an executable."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from codetta.partition.plan import Plan

NEW: Mapping[str, Tensor] = MappingProxyType({})  # no output's memory is given


class Runnable(Protocol):
    """A plan ready to run."""

    def run(
        self,
        inputs: Mapping[str, Tensor],
        rows: int,
        given_up: frozenset[str] = frozenset(),
        into: Mapping[str, Tensor] = NEW,
    ) -> dict[str, Tensor]:
        """The output buffers by name, from the inputs by name and the token count. Each output is contiguous memory
        of its own, or what the caller gives for it in ``into``; inputs are never modified, but for those that are
        ``given_up``, which may hold anything after. What is given may be an input's memory only where one map of single
        elements reads the one and writes the other."""
        ...


class Backend(Protocol):
    """Makes plans ready to run."""

    def __call__(self, plan: Plan, *, batch_invariant: bool = False) -> Runnable:
        """``batch_invariant``: the bits of a row do not depend on how many rows there are."""
        ...
