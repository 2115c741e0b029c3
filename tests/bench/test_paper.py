"""The paper's ten programs: each is one kernel at the paper's shapes, and right against plain PyTorch."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from codetta.backends.hopper.choose import why_split
from codetta.bench import paper
from codetta.bench.baselines import BARE
from codetta.bench.kernels import Settings
from codetta.bench.paper import PROGRAMS, bound
from codetta.bench.report import OURS, Report
from codetta.bench.shapes import PAPER, SHAPES

TINY = SHAPES["tiny"]


def test_there_are_ten():
    assert len({e.name for e in PROGRAMS}) == 10


@pytest.mark.skipif(find_spec("quack") is None, reason="the kernels' packages are not installed")
@pytest.mark.parametrize("shape", PAPER)
@pytest.mark.parametrize("entry", PROGRAMS, ids=lambda e: e.name)
def test_each_is_one_kernel(entry: paper.Entry, shape: str):
    assert why_split(bound(entry, SHAPES[shape])) is None


def test_each_is_right_and_timed():
    report = Report("paper")
    paper.paper([TINY], Settings(rounds=1, variants=("compile",)), report, "reference")
    ours = {r.case: r for r in report.rows if r.variant == OURS}
    assert ours.keys() == {e.name for e in PROGRAMS}
    assert all(r.median and r.base == BARE and r.error is not None and r.error < 4e-3 for r in ours.values())
    assert not [r.note for r in report.rows if r.note]
