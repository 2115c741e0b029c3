"""How ``benchmarks/train_curves.py`` judges loss curves, and what is left of a run that is cut off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 120
WANTED = tuple((way, seed) for way in ("inductor", "codetta") for seed in range(3))


@pytest.fixture(scope="module")
def scripts() -> Any:
    """The scripts' modules, which are in no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setattr(sys, "argv", ["train_curves.py"])
        import train_curves

        yield train_curves


def compared(scripts: Any, offset: float, seeds: int = 3) -> Any:
    """Runs whose losses are constant: those of three seeds 0.1 apart, codetta's higher by an offset."""
    runs = [
        scripts.Run(way, seed, [2.0 + 0.1 * seed + offset * (way == "codetta")] * STEPS, held_out=1.0)
        for way, seed in WANTED
        if seed < seeds
    ]
    wanted = tuple((r.way, r.seed) for r in runs)
    return scripts.Compared(scripts.SUBJECTS[0], 1, wanted, tuple(runs))


@pytest.mark.parametrize("offset, ok", [(0.19, True), (0.21, False), (-0.21, False)])
def test_the_distance_of_mean_curves_is_judged_by_the_range_of_seeds(scripts: Any, offset: float, ok: bool):
    found = compared(scripts, offset)
    assert found.ok is ok
    distance, allowed = found.checks["mean training loss, mean over all steps"]
    assert (distance, allowed) == (pytest.approx(abs(offset)), pytest.approx(0.2))


def test_two_seeds_are_judged_pair_by_pair(scripts: Any):
    distance, allowed = compared(scripts, 0.05, seeds=2).checks["training loss, mean over all steps"]
    assert (distance, allowed) == (pytest.approx(0.05), pytest.approx(0.1))


def test_losses_are_smoothed_before(scripts: Any):
    found = compared(scripts, 0.0)
    for run in found.of("codetta"):
        run.losses = [loss + 10.0 * (i == 30) for i, loss in enumerate(run.losses)]
    assert found.means[0][30] == pytest.approx(10.0 / 20)
    assert fmean(found.means[0]) == pytest.approx(20 * 0.5 / STEPS)


def test_nothing_is_decided_while_runs_are_missing(scripts: Any, tmp_path: Path):
    """A run that is cut off leaves curves of different lengths, which are drawn and shown all the same; only whole runs
    are taken up again."""
    found = compared(scripts, 0.0)
    found.runs[-1].losses, found.runs[-1].held_out = found.runs[-1].losses[:50], None
    assert not found.complete
    assert not found.checks
    assert not found.ok
    assert len(found.means[0]) == 50
    scripts.table(found)
    scripts.draw([found], tmp_path / "curves.png")
    scripts.write(tmp_path / "curves.json", scripts.to_json([found], "cpu"))
    assert not json.loads((tmp_path / "curves.json").read_text())["ok"]
    again: dict[str, Any] = {}
    scripts.read(tmp_path / "curves.json", again, scripts.SUBJECTS, WANTED, STEPS)
    (kept,) = again.values()
    assert [(r.way, r.seed) for r in kept.runs] == list(WANTED[:-1])
    assert kept.runs[0] == found.runs[0]
