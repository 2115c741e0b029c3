"""How the head's logits are held between forward and backward: a model of memory and time, in plain numbers.

The vocabulary is cut into slabs of columns, and each slab's logits are held in one of three ways:

- ``own``: kept in memory of their own, and turned into their gradient in place;
- ``lent``: kept in the memory that will hold the weight's gradient, which is as long as the weight and empty until
  then. A slab leaves it for a buffer of one slab, as its gradient, just before the rows of the weight's gradient that
  are written there;
- ``again``: not kept, computed again in backward by a GEMM whose epilogue gives their gradient.

Backward goes through the slabs in order. Each gives its rows of the weight's gradient, complete and rounded once; the
input's gradient is their sum in float32, or, of a single slab, one GEMM. ``fast`` computes nothing again, and borrows
where at least half of the logits fits into lent memory: to save less is not worth the time of a sum over slabs.
``lean`` keeps what costs no memory, which is all of it where there are no more tokens than features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from codetta.errors import SettingsError

How = Literal["own", "lent", "again"]
MODES = ("auto", "fast", "lean")
EXPONENTIALS = "exponentials"  # fast, and what is kept are no logits (``nn.exponentials``)

GRAIN = 8  # columns: rows of whole 16 bytes
SLAB_GRAIN = 256  # columns of a slab: whole tiles of a kernel
LEAN_SLAB = 112 << 20  # bytes: a few dozen waves of tiles on an H200, and a tenth of the gradients at d = 2048
OF_GRADIENT = 10  # a slab may take this part of the weight's gradient
OF_LOGITS = 12  # of fast's logits
OF_FAST = 0.74  # fast takes larger slabs as long as it stays below this part of logits and gradients held at once
WORTH = 2  # fast borrows for this part of the logits or more
OF_DEVICE = 24  # `auto` is fast if that needs less than this part of the device's memory more than lean
UNKNOWN_DEVICE = 32 << 30  # bytes, where the device does not tell (0): a laptop's


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, features, columns of the vocabulary, bytes of an element and of a sum, and whether one kernel takes a
    whole range of columns without writing an accumulator."""

    tokens: int
    features: int
    columns: int
    itemsize: int = 2
    sumsize: int = 4
    fused: bool = True

    @property
    def logits(self) -> int:
        """Bytes of all logits."""
        return self.tokens * self.columns * self.itemsize

    @property
    def weight(self) -> int:
        """Bytes of the weight, and of its gradient."""
        return self.columns * self.features * self.itemsize

    @property
    def sums(self) -> int:
        """Bytes of the input's gradient as a sum."""
        return self.tokens * self.features * self.sumsize

    @property
    def rounded(self) -> int:
        """Bytes of the input's gradient."""
        return self.tokens * self.features * self.itemsize

    @property
    def stride(self) -> int:
        """Elements of lent memory from one column's logits to the next's: where the rows of the weight's gradient that
        a slab gives begin no later than the slab's own logits."""
        return max(self.tokens, self.features)


@dataclass(frozen=True, slots=True)
class Slab:
    """Columns ``start:stop`` of the vocabulary, and how their logits are held."""

    start: int
    stop: int
    how: How

    @property
    def columns(self) -> int:
        """How many."""
        return self.stop - self.start


def choose(sizes: Sizes, memory: str, lends: bool, device_bytes: int) -> str:
    """``fast``, which ``lends`` or not, or ``lean``; by the sizes and the device alone, so that a step does not depend
    on the one before."""
    if memory not in MODES:
        raise SettingsError(f"memory={memory!r}", hint=f"one of {', '.join(MODES)}")
    if memory != "auto":
        return memory
    more = sizes.logits - lent_columns(sizes, "fast", lends) * sizes.tokens * sizes.itemsize
    return "fast" if more * OF_DEVICE <= (device_bytes or UNKNOWN_DEVICE) else "lean"


def slabs(sizes: Sizes, mode: str, lends: bool) -> tuple[Slab, ...]:
    """The slabs in the order in which backward takes them; all ``lent`` ones come first."""
    lent = lent_columns(sizes, mode, lends)
    width = slab_width(sizes, mode, lent > 0)
    rest: How = "again" if mode == "lean" else "own"
    found = list(cut(0, lent, width, "lent"))
    return (*found, *cut(lent, sizes.columns, sizes.columns if rest == "own" else width, rest))


def lent_columns(sizes: Sizes, mode: str, lends: bool) -> int:
    """How many of the first columns have their logits in lent memory."""
    fit = sizes.columns * sizes.features // max(sizes.stride, 1) if lends and mode != EXPONENTIALS else 0
    fit = min(fit // GRAIN * GRAIN, sizes.columns)
    return 0 if mode == "fast" and fit < sizes.columns // WORTH // GRAIN * GRAIN else fit


def regions(held: tuple[Slab, ...], fused: bool) -> Iterator[Slab]:
    """The ranges of columns that forward computes at once: what is not kept in one go, where no accumulator is
    written."""
    waiting: Slab | None = None
    for s in held:
        joins = fused and s.how == "again" and s.columns % GRAIN == 0
        if waiting is not None and joins:
            waiting = Slab(waiting.start, s.stop, "again")
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if joins:
            waiting = s
        else:
            yield s
    if waiting is not None:
        yield waiting


def slab_width(sizes: Sizes, mode: str, lends: bool) -> int:
    """The columns of a slab, at most."""
    held = LEAN_SLAB
    if mode == "lean":
        held = max(held, sizes.weight // OF_GRADIENT)
    elif lends:
        both = sizes.logits + sizes.weight + sizes.rounded
        held = max(sizes.logits // OF_LOGITS, int(OF_FAST * both) - sizes.logits - sizes.sums)
    columns = held // max(sizes.tokens * sizes.itemsize, 1) // SLAB_GRAIN * SLAB_GRAIN
    return max(columns, SLAB_GRAIN)


def cut(start: int, stop: int, width: int, how: How) -> Iterator[Slab]:
    """As few slabs as that width allows, equal ones; columns beyond the last whole 16 bytes are a slab of their own."""
    aligned = start + (stop - start) // GRAIN * GRAIN
    count = max(-(-(aligned - start) // width), 1)
    even = -(-(aligned - start) // (count * SLAB_GRAIN)) * SLAB_GRAIN
    for first in range(start, aligned, max(even, 1)):
        yield Slab(first, min(first + even, aligned), how)
    if aligned < stop:
        yield Slab(aligned, stop, how)


def steps(sizes: Sizes, held: tuple[Slab, ...], given_up: bool) -> tuple[Slab, ...]:
    """The slabs as backward takes them: logits that may not be written over, in parts whose gradient takes less
    memory, as many as with lent memory."""
    if given_up:
        return held
    width = slab_width(sizes, "fast", True)
    return tuple(p for s in held for p in (cut(s.start, s.stop, width, s.how) if s.how == "own" else (s,)))


def peak(sizes: Sizes, held: tuple[Slab, ...]) -> int:
    """The most bytes of a training step above x, weight and upstream gradient, of what grows with features or columns:
    held logits, both gradients, and what a slab takes. No second backward is to come."""
    column = sizes.tokens * sizes.itemsize
    kept = sum(s.columns for s in held if s.how == "own") * column + sizes.weight  # the gradient, lent before or not
    buffers = [0 if s.how == "own" else s.columns * column for s in held]
    if len(held) == 1:
        return kept + sizes.rounded + buffers[0]
    return kept + sizes.sums + max(*buffers, sizes.rounded)
