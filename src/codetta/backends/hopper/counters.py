"""Counters in memory: clusters of a dynamically scheduled kernel take their tiles from one, and the blocks of a pass
that makes a total see from one which of them is the last.

Each launch leaves its counter at zero, so nothing is cleared between launches. Launches that may run at the same time
must not share one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count

import torch

SHARED = 4096  # counters that take turns: no more launches than that are under way at once on all streams
KEPT = 61_440  # counters for captured graphs, whose launches keep theirs for good; then these take turns too
APART = 4  # 32-bit numbers from one counter to the next: each begins at 16 bytes, which Triton looks at
BYTES = 4 * APART


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter as QuACK takes it: by its address."""

    address: int

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def next_counter(device: int) -> Counter:
    """The counter of one launch on the current stream of a GPU."""
    return Counter(_counters(device)[0] + BYTES * _next(device))


def next_as_tensor(device: int) -> torch.Tensor:
    """The same as a tensor of one element, for Triton."""
    first = APART * _next(device)
    return _memory(device)[first : first + 1]


def _next(device: int) -> int:
    _, shared, kept = _counters(device)
    return SHARED + next(kept) % KEPT if torch.cuda.is_current_stream_capturing() else next(shared) % SHARED


@cache
def _memory(device: int) -> torch.Tensor:
    """Zeros that live as long as the process, and that every stream finds there."""
    found = torch.zeros(APART * (SHARED + KEPT), dtype=torch.int32, device=torch.device("cuda", device))
    torch.cuda.synchronize(device)
    return found


@cache
def _counters(device: int) -> tuple[int, count[int], count[int]]:
    return _memory(device).data_ptr(), count(), count()


def prepare(device: int) -> None:
    """Allocate the counters: not to be done first while a graph is captured, which would clear them at every replay, or
    while memory comes from a graph's pool."""
    _counters(device)
