"""Which configuration is fastest: many are timed a little, the best of them with their neighbours, the last few each
in a run of its own, at the clock that its power allows.

The search knows no GPU: what compiles and times is a ``Bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

from codetta.backends.hopper.choose import bare_config, choose, extent, is_bare, lowered_of
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.config import Config, bucket
from codetta.backends.hopper.lowered import Lowered
from codetta.backends.hopper.space import neighbours, space
from codetta.backends.hopper.table import Entry, Key, key_of
from codetta.ir.program import Program
from codetta.partition.plan import Plan

SLIGHT = 8  # spilled registers a thread and tile that cost less than the differences looked for
DEEP = 3  # stages of A and B from which loads overlap products: those hold two, the last and the next
FIRST, SECOND, LAST = 3, 5, 3  # rounds of each heat
KEPT, SEEDS, FINALISTS = 3, 2, 6  # who goes on to the second heat, who of them brings neighbours, who to the last
BEHIND = 1.1  # how much longer than the fastest a tile may take behind the filler, and be timed by itself
COMPILING = 0.5  # the part of the budget after which no more kernels are compiled
MARGIN = 0.005  # a default stays, and the library's GEMM stays, unless the winner is faster by more


@dataclass(frozen=True, slots=True)
class Case:
    """A program at a number of tokens. ``default`` is what it would run with: None is the library's GEMM."""

    program: Program
    lowered: Lowered
    tokens: int
    default: Config | None

    @property
    def key(self) -> Key:
        """Where its winner is kept."""
        return key_of(self.program, self.lowered, self.tokens)


@dataclass(frozen=True, slots=True)
class Made:
    """What a compiled kernel tells: the registers that a thread spills, the stages of A and B if they are known."""

    spills: int
    stages: int | None = None

    def holds(self, stages: int) -> bool:
        """Whether it has as many stages, as far as is known."""
        return self.stages is None or self.stages >= stages


Pick = tuple[Case, Config | None]  # None: the library's bare GEMM, which every case is compared with
Times = dict[Pick, float]


class Bench(Protocol):
    """Compiles, checks and times kernels."""

    def compile(self, picks: Sequence[Pick], seconds: float) -> Mapping[Pick, Made]:
        """What each kernel tells, of those that compile within that time; the first are the most wanted."""
        ...

    def right(self, pick: Pick) -> bool:
        """Whether a kernel computes what its program says."""
        ...

    def time(self, picks: Sequence[Pick], rounds: int, seconds: float) -> Times:
        """Median times in microseconds, all taken side by side; fewer rounds where they would take longer."""
        ...

    def time_alone(self, picks: Sequence[Pick], rounds: int, seconds: float) -> Times:
        """Median times in microseconds, each taken in a run of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """A case's winner (None: the library), and the times of it, of the default and of the library's bare GEMM; of all
    configurations of the last heat, the fastest first."""

    case: Case
    winner: Config | None
    us: float
    default_us: float
    library_us: float
    tried: tuple[tuple[Config, float], ...] = ()

    @property
    def entry(self) -> Entry:
        """As a table keeps it."""
        return Entry(self.winner, self.us, self.library_us, self.case.program.name)


def cases_of(plans: Iterable[Plan], tokens: Sequence[int]) -> list[Case]:
    """The distinct programs of some plans at each number of tokens; of alike programs the first stands for all."""
    return cases_of_programs([s.program for plan in plans for s in plan.steps if s.kind == "gemm"], tokens)


def cases_of_programs(programs: Sequence[Program], tokens: Sequence[int]) -> list[Case]:
    """The same of programs; those that are no single kernel are left out."""
    found: dict[Key, Case] = {}
    for count in tokens:
        for program in programs:
            try:
                lowered = lowered_of(program)
                default = bare_config(program, count) if is_bare(program) else choose(program, count)[1]
            except NotLowered:
                continue
            case = Case(program, lowered, count, default)
            found.setdefault(case.key, case)
    return list(found.values())


def tune(
    cases: Sequence[Case],
    bench: Bench,
    *,
    budget: float,
    clock: Callable[[], float] = perf_counter,
    keep: Callable[[list[Found]], None] = lambda _: None,
) -> list[Found]:
    """The winners. ``budget`` is in seconds; where it is short, what is left out is neighbours first, then rounds.
    ``keep`` gets what is known after each heat."""
    begin = clock()

    def left(part: float = 1.0) -> float:
        return max(0.0, begin + part * budget - clock())

    tried = {case: _first(case) for case in cases}
    good = _compiled(_by_turns(tried), bench, left(COMPILING), DEEP)
    times = bench.time(_with_library(cases, good), FIRST, left())
    keep([_found(case, times) for case in cases])
    if left(COMPILING) > 0:
        near = {case: _near(case, _best(case, times, SEEDS)) for case in cases}
        # A neighbour has the stages of the tile that it is near, which was timed.
        found = _compiled(_by_turns(near), bench, left(2 * COMPILING) / 2)
        again = [(case, c) for case in cases for c in _best(case, times, KEPT)]
        times |= bench.time(_with_library(cases, [*again, *found]), SECOND, left())
        keep([_found(case, times) for case in cases])
    last = [(case, c) for case in cases for c in _finalists(case, times)]
    final = bench.time_alone(_with_library(cases, last), LAST, left())
    winners = [replace(_found(case, final), tried=_tried(case, final)) for case in cases]
    keep(winners)
    return winners


def _first(case: Case) -> list[Config]:
    known = [case.default] if case.default is not None else []
    return list(dict.fromkeys([*known, *space(case.lowered, *extent(case.program, case.lowered, bucket(case.tokens)))]))


def _near(case: Case, best: Iterable[Config]) -> list[Config]:
    return list(dict.fromkeys(n for c in best for n in neighbours(case.lowered, c)))


def _by_turns(tried: Mapping[Case, Sequence[Config]]) -> list[Pick]:
    """Every case's first, then every case's second: where time runs out each has had its best."""
    longest = max(map(len, tried.values()), default=0)
    return [(case, tried[case][i]) for i in range(longest) for case in tried if i < len(tried[case])]


def _compiled(picks: Sequence[Pick], bench: Bench, seconds: float, stages: int = 0) -> list[Pick]:
    """Those that compile, spill hardly anything and are right. One with fewer stages than that is its case's default,
    or its case has nothing better."""
    made = bench.compile(picks, seconds)
    lean = [p for p in picks if p in made and made[p].spills <= SLIGHT]
    deep = {p for p in lean if made[p].holds(stages) and bench.right(p)}
    served = {case for case, _ in deep}
    return [p for p in lean if p in deep or ((p[0] not in served or p[1] == p[0].default) and bench.right(p))]


def _with_library(cases: Sequence[Case], picks: Sequence[Pick]) -> list[Pick]:
    return list(dict.fromkeys([*((case, None) for case in cases), *picks]))


def _tried(case: Case, times: Times) -> tuple[tuple[Config, float], ...]:
    ours = [(config, us) for (c, config), us in times.items() if c == case and config is not None]
    return tuple(sorted(ours, key=lambda pair: pair[1]))


def _best(case: Case, times: Times, count: int) -> list[Config]:
    return [config for config, _ in _tried(case, times)[:count]]


def _finalists(case: Case, times: Times) -> list[Config]:
    """The fastest, the fastest of each other tile that is not far behind, since tiles differ in power, and the default;
    then others by their time."""
    known = [case.default] if (case, case.default) in times and case.default is not None else []
    order = _tried(case, times)
    tiles = {(c.tile_m, c.tile_n, c.pingpong): c for c, us in reversed(order) if us <= BEHIND * order[0][1]}
    chosen = sorted(tiles.values(), key=[c for c, _ in order].index)
    return list(dict.fromkeys([*[*chosen, *(c for c, _ in order if c not in chosen)][:FINALISTS], *known]))


def _found(case: Case, times: Times) -> Found:
    library = times[case, None]
    default_us = times.get((case, case.default), float("nan"))
    best = _best(case, times, 1)
    winner: Config | None = best[0] if best else case.default
    us = times.get((case, winner), float("nan"))
    for kept in (case.default, None):
        allowed = kept is not None or is_bare(case.program)
        if allowed and times.get((case, kept), float("inf")) <= us * (1 + MARGIN):
            winner, us = kept, times[case, kept]
    return Found(case, winner, us, default_us, library)
