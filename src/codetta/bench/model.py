"""The model level: whole training runs of unmodified models, each contender in a fresh process of its own.

The processes of a case start and compile side by side. Then they take turns on the device, one at a time, in a new
order each round; behind its turn a process gives its memory back. So all see the same clocks, and ratios are paired, as
everywhere: by steps of the same round.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from codetta.bench.kernels import Settings
from codetta.bench.model_cases import EAGER, Case, case_named, contenders_named
from codetta.bench.model_rows import ModelReport, ModelRow, rows_of
from codetta.bench.model_run import FORWARD_BACKWARD, FULL, Asked, Found
from codetta.bench.report import OURS
from codetta.bench.workers import Worker, caches_in

LEVEL = "model"
STEPS = 5
ROUNDS = 4
LONGEST = 900.0  # seconds that a duty may take if there is no budget
FIRST = 0.4  # the part of a budget that first steps may take: who does not end its compilation leaves time to the rest
SHORTEST = 5.0  # and that it gets at least, once it has begun
NO_MEMORY = ("out of memory", "ALLOC_FAILED")


@dataclass(frozen=True)
class Chosen:
    """What is asked of this level: cases, timed steps of a turn, the options of our backend, and whether first steps
    are taken alone and timed, also with empty caches."""

    cases: tuple[str, ...]
    steps: int = STEPS
    options: dict[str, Any] = field(default_factory=dict)
    cold: bool = False

    def options_of(self, contender: str) -> dict[str, Any]:
        """Those that a contender gets: ours alone."""
        return self.options if contender.startswith(OURS) else {}

    def name_of(self, contender: str) -> str:
        """A contender, with the options that it got."""
        return ", ".join([contender, *(f"{name}={value}" for name, value in self.options_of(contender).items())])


def model(chosen: Chosen, settings: Settings, report: ModelReport) -> None:
    """Measure all contenders on all cases."""
    wanted = contenders_named(settings.variants)
    for case in [case_named(name) for name in chosen.cases]:
        if report.has_time(case.name):
            Trial(case, chosen, settings, report).run(wanted)


@dataclass
class Trial:
    """One case: a process for each contender, and in ``cold`` another one that begins with empty caches."""

    case: Case
    chosen: Chosen
    settings: Settings
    report: ModelReport
    workers: dict[str, Worker] = field(default_factory=dict)
    cold: dict[str, Worker] = field(default_factory=dict)
    reference: Found = field(default_factory=Found)

    def run(self, wanted: Sequence[str]) -> None:
        """All of it; whatever happens, no process stays."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._start(wanted, Path(folder))
                self._measure(wanted)
            finally:
                for worker in (*self.workers.values(), *self.cold.values()):
                    worker.end()

    def _start(self, wanted: Sequence[str], folder: Path) -> None:
        """Processes for all; they import and build the model side by side."""
        for contender in (*wanted, *({EAGER} - set(wanted))):
            environment = caches_in(folder / contender.replace(" ", "-")) if self.chosen.cold else ()
            asked = Asked(self.case.name, contender, self.settings.device, self.chosen.options_of(contender))
            self.workers[contender] = Worker(asked, environment)
            if self.chosen.cold and contender != EAGER:  # which compiles nothing
                self.cold[contender] = Worker(asked, environment)

    def _measure(self, wanted: Sequence[str]) -> None:
        """The unmodified model's loss, first steps, a round of turns, where the time goes, and the other rounds."""
        self.settings.tell(f"{self.case.name}: the unmodified model")
        self.reference = self.workers[EAGER].ask("first", self._seconds(), loss=None, norm=None)
        if EAGER not in wanted:
            self.workers.pop(EAGER).end()
        if self.reference.note:
            self._keep(f"the unmodified model gave no loss: {self.reference.note}")
            return
        (self._first_alone if self.chosen.cold else self._first_side_by_side)()
        order, shuffle = list(self.workers), random.Random(0).shuffle
        for done in range(min(ROUNDS, self.settings.rounds)):
            shuffle(order)
            self._each(f"round {done + 1}", order, "turn", steps=self.chosen.steps)
            if done == 0:
                self._each("where the time goes", list(self.workers), "profile")

    # --- first steps --------------------------------------------------------------------------------------------------

    def _first_side_by_side(self) -> None:
        """They compile at the same time, so nobody's first step is told. Those short of memory get another process,
        alone."""
        self.settings.tell(f"{self.case.name}: first steps")
        with ThreadPoolExecutor(self.case.together) as pool:
            for _ in pool.map(self._first, self._there):
                self._keep()
        for contender, worker in self.workers.items():
            if any(text in worker.found.note for text in NO_MEMORY):
                worker.end()
                self.workers[contender] = Worker(worker.asked, worker.environment)
                self._first(contender)
                self._keep()

    def _first_alone(self) -> None:
        """One at a time: with empty caches, and in another process with those that the first one left."""
        for contender in self._there:
            self.settings.tell(f"{self.case.name}: {contender}, first step")
            self.cold[contender].ask("first", self._seconds(), **self._bar)
            self.cold[contender].end()
            self._first(contender)
            self._keep()

    @property
    def _there(self) -> list[str]:
        """Those whose first step is still to be taken, the ones that compile first."""
        return [c for c in self.workers if c != EAGER and self.report.has_time(f"{self.case.name} {c}")]

    @property
    def _bar(self) -> dict[str, float | None]:
        return {"loss": self.reference.loss, "norm": self.reference.norm}

    def _first(self, contender: str) -> None:
        self.workers[contender].ask("first", self._seconds(FIRST), **self._bar)

    # --- turns --------------------------------------------------------------------------------------------------------

    def _each(self, what: str, order: Sequence[str], duty: str, **given: Any) -> None:
        """A duty of all, one after the other; results are kept behind each."""
        for contender in order:
            if self.workers[contender].found.loss is None:
                continue
            if self.report.has_time(f"{self.case.name} {contender}, {what}"):
                self.settings.tell(f"{self.case.name}: {contender}, {what}")
                self.workers[contender].ask(duty, self._seconds(), **given)
                self._keep()

    def _seconds(self, part: float = 1.0) -> float:
        """What a duty may take: what is left of the budget, at most that part of it."""
        budget = self.report.seconds
        return LONGEST if budget is None else max(min(part * budget, budget - self.report.elapsed), SHORTEST)

    def _keep(self, note: str = "") -> None:
        """All rows as they are now, on disk too."""
        blank = ModelRow(LEVEL, self.case.name, self.case.tokens, FULL if self.case.optimizer else FORWARD_BACKWARD, "")
        rows: list[ModelRow] = []
        for contender, worker in self.workers.items():
            found = replace(worker.found, note=worker.found.note or note)
            cold = self.cold[contender].found if contender in self.cold else None
            named = replace(blank, variant=self.chosen.name_of(contender))
            rows += rows_of(named, rows, found, self.reference, cold)
        self.report.renew(self.case.name, rows)
