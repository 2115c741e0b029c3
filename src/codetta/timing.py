"""How codetta takes times: variants side by side, under sustained load, in random order.

The protocol of ``measure``, on a GPU:

- *What is timed* is the GPU's time between two CUDA events, the first recorded right before the variant is called and
  the second right after. Everything that the variant launches on the current stream is inside, gaps between its
  kernels too. What the variant prepares on the CPU is not, as long as it takes less time than the filler before it.
- *Before each call* an untimed filler: a bfloat16 GEMM of 8192 x 8192 x 8192, about 1.7 ms on an H200. It keeps the
  card at its power cap, so that clocks are those of a training step; it gives the host a head start, so that launches
  are queued when the events are reached; and its 384 MiB of operands push what the variant uses out of the L2 cache.
- *Heating*: the filler runs for a third of a second before the first round, then two rounds are run and thrown away.
- *Every round* calls each variant once, in a fresh random order: a variant that always follows a slow, low-power one
  would get higher clocks. The GPU is waited for once a round, so that it does not cool down between calls.
- *What is told*: median, 10th and 90th percentile in microseconds. Two variants are compared by their paired ratio, the
  median over rounds of one time over the other in the same round, which drift of the clocks does not touch.

The filler sets the clock for everybody. In a training step a kernel runs at the clock that its own power, and that of
its neighbours, leaves: of two that are equally fast behind the filler one may draw a tenth more. ``measure_alone``
tells them apart: it runs each variant over and over, for longer than the card's power takes to settle. The operands of
small ones stay in the L2 cache, so that it compares kernels with the same operands, and nothing else.

Without a GPU a sample is the wall time of the call, and there is no filler: good for trying the machinery, for nothing
else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

Variant = Callable[[], object]
Order = list[tuple[str, Variant]]  # of one round
Progress = Callable[[int, int], None]  # rounds done, rounds planned

FILLER_SIZE = 8192
HEAT_SECONDS = 0.33
WARM_ROUNDS = 2
WARM_CALLS = 10
FEWEST_ROUNDS = 5  # whatever the budget says
ALONE_SECONDS = 0.1  # of one variant's run of its own, of which the second half is timed


@dataclass(frozen=True)
class Timing:
    """One variant's samples in microseconds, one a round; the same place in two timings is the same round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle sample."""
        return median(self.samples)

    @property
    def p10(self) -> float:
        """A tenth of the samples is below this."""
        return self._quantile(0.1)

    @property
    def p90(self) -> float:
        """A tenth of the samples is above this."""
        return self._quantile(0.9)

    def over(self, other: Timing) -> float:
        """The paired ratio: the median over rounds of this time over the other's."""
        return median(a / b for a, b in zip(self.samples, other.samples, strict=True))

    def _quantile(self, q: float) -> float:
        ordered = sorted(self.samples)
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def measure(
    variants: Mapping[str, Variant],
    *,
    rounds: int,
    filler: Variant | None = None,
    seed: int = 0,
    budget: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Timing]:
    """The timing of each variant by the protocol above, on the current GPU if there is one.

    ``filler`` stands in for the default one, which is made here if none is given: pass ``gemm_filler()`` to many calls,
    so that its operands are allocated once. ``budget`` in seconds ends the rounds early, but not before five of them. A
    variant that raises ends everything: try it once before.
    """
    gpu = torch.cuda.is_available()
    filler = filler or (gemm_filler() if gpu else _nothing)
    take = _gpu_round if gpu else _wall_round
    if gpu:
        _heat(filler)

    def enough(done: int, seconds: float) -> bool:
        return budget is not None and done >= FEWEST_ROUNDS and seconds > budget

    return _rounds(
        variants,
        lambda order: take(order, filler),
        rounds,
        warm=WARM_ROUNDS,
        seed=seed,
        progress=progress,
        enough=enough,
    )


def measure_alone(
    variants: Mapping[str, Variant],
    *,
    rounds: int,
    seconds: float = ALONE_SECONDS,
    seed: int = 0,
    budget: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Timing]:
    """Microseconds a call of each variant in a run of its own, at the clock that its own power allows; every round in a
    fresh random order. ``budget`` in seconds ends the rounds early, but not before the first."""

    def enough(done: int, taken: float) -> bool:  # no time for one more
        return budget is not None and taken > budget * done / (done + 1)

    def take(order: Order) -> dict[str, float]:
        return {name: _over_and_over(variant, seconds) for name, variant in order}

    return _rounds(variants, take, rounds, seed=seed, progress=progress, enough=enough)


def _rounds(
    variants: Mapping[str, Variant],
    take: Callable[[Order], Mapping[str, float]],
    planned: int,
    *,
    warm: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
    enough: Callable[[int, float], bool] = lambda done, seconds: False,
) -> dict[str, Timing]:
    """The samples that ``take`` gives of the variants in an order, a fresh random one every round. ``warm`` rounds come
    before and are thrown away; ``enough``, asked with the rounds and seconds behind it, ends them early."""
    order, shuffle = list(variants.items()), random.Random(seed).shuffle
    found: dict[str, list[float]] = {name: [] for name in variants}
    begin = perf_counter()
    for done in range(-warm, planned):
        shuffle(order)
        samples = take(order)
        if done < 0:
            continue
        for name, sample in samples.items():
            found[name].append(sample)
        if progress is not None:
            progress(done + 1, planned)
        if enough(done + 1, perf_counter() - begin):
            break
    return {name: Timing(tuple(samples)) for name, samples in found.items()}


def _over_and_over(variant: Variant, seconds: float) -> float:
    """Microseconds a call, in the second half of so many seconds."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    variant()
    wait()
    begin = perf_counter()
    variant()
    wait()
    count = max(1, round(seconds / 2 / max(perf_counter() - begin, 1e-6)))
    if not torch.cuda.is_available():
        begin = perf_counter()
        for _ in range(count):
            variant()
        return (perf_counter() - begin) * 1e6 / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, end):
        for _ in range(count):
            variant()
        event.record()
    wait()
    return float(start.elapsed_time(end)) * 1e3 / count


def launch_times(
    variants: Mapping[str, Variant], *, calls: int, seed: int = 0, progress: Progress | None = None
) -> dict[str, Timing]:
    """The CPU's time of each variant's call, from an empty queue until the call returns; in a fresh random order every
    time, the GPU waited for before each call. What a call returns is freed after its time is taken."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing

    def take(order: Order) -> dict[str, float]:
        samples = {}
        for name, variant in order:
            wait()
            begin = perf_counter()
            held = variant()
            samples[name] = (perf_counter() - begin) * 1e6
            del held
        return samples

    found = _rounds(variants, take, calls, warm=WARM_CALLS, seed=seed, progress=progress)
    wait()
    return found


def gemm_filler(size: int = FILLER_SIZE) -> Variant:
    """A bfloat16 GEMM into memory of its own, on the current GPU. Random operands: zeros would draw less power."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _nothing() -> None:
    """The filler of a CPU."""


def _heat(filler: Variant) -> None:
    """Run the filler until the card's power has settled; a few at a time, so that the clock is looked at."""
    begin = perf_counter()
    while perf_counter() - begin < HEAT_SECONDS:
        for _ in range(8):
            filler()
        torch.cuda.synchronize()


def _gpu_round(variants: Order, filler: Variant) -> dict[str, float]:
    """Microseconds between the events around each call; nothing waits inside a round."""
    events = {}
    for name, variant in variants:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        filler()
        start.record()
        variant()
        end.record()
        events[name] = start, end
    torch.cuda.synchronize()
    return {name: start.elapsed_time(end) * 1e3 for name, (start, end) in events.items()}


def _wall_round(variants: Order, filler: Variant) -> dict[str, float]:
    """Microseconds of wall time of each call."""
    found = {}
    for name, variant in variants:
        filler()
        begin = perf_counter()
        variant()
        found[name] = (perf_counter() - begin) * 1e6
    return found
