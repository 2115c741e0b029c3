"""What a backend is: it turns a Plan into an executable."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from codetta.partition.plan import Plan

# Of rows held as exponentials: what is taken from a row without a target; the most that a log-sum-exp may lie above its
# target's logit, in nats, before the row is computed again (bfloat16 ends at 88, and a factor of e^-60 leaves its
# products with x normal numbers); the least part of the target's gradient that the log-sum-exp's may be.
FAR, MOST, LEAST = 1e30, 60.0, 2.0**-30

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


class Attention(NamedTuple):
    """What attention looks at, everything or what comes no later, or that within a window; and the factor of scores."""

    causal: bool
    window: int | None
    scale: float


class HeadTensors(NamedTuple):
    """A head: x (tokens, features), weight (columns, features), the targets' columns in int32, -1 for none, and the
    factor of the logits."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    scale: float


class Exponentials(NamedTuple):
    """What is held of a head: a matrix (tokens, columns) of exponentials, the factor that makes each row probabilities,
    and the target's own probability; both are 0 of a row without a target."""

    matrix: Tensor
    unit: Tensor
    probability: Tensor


class HeadRows(Protocol):
    """What happens to a head's rows between its GEMMs, where forward holds exponentials of its logits: the functions of
    ``reference.exponentials``, which says what they give."""

    def reference(self, head: HeadTensors) -> Tensor:
        """What is taken from each row's logits."""
        ...

    def settle(
        self, head: HeadTensors, lse: Tensor, target: Tensor, near: Tensor, matrix: Tensor
    ) -> tuple[Tensor, Tensor, Exponentials]:
        """Log-sum-exp, target's logit, and what is held, put right."""
        ...

    def scale_rows(
        self, head: HeadTensors, held: Exponentials, d_lse: Tensor, d_target: Tensor, into: Tensor | None
    ) -> Tensor:
        """The factor of each row; x times that goes ``into`` memory, and the matrix gets the targets' entries."""
        ...


class Backend(Protocol):
    """Makes plans ready to run."""

    def __call__(self, plan: Plan, *, batch_invariant: bool = False) -> Runnable:
        """``batch_invariant``: the bits of a row do not depend on how many rows there are."""
        ...
