"""The loss level on a CPU: who takes part, that all are right, that a wrong one is told and not timed."""

from __future__ import annotations

import pytest
import torch

from codetta.bench import loss
from codetta.bench.contenders import BARE, OURS
from codetta.bench.kernels import Settings
from codetta.bench.report import Report
from codetta.bench.shapes import SHAPES

TINY = SHAPES["tiny"]
QUICK = Settings(rounds=1)


def test_everybody_is_held_against_the_bare_gemms():
    report = Report("loss")
    loss.loss([TINY], QUICK, report)
    rows = {r.variant: r for r in report.rows}
    assert list(rows) == [BARE, *(name for name, _ in loss.contenders(TINY, False))]
    assert report.ok
    for name in (f"{OURS}, fast", f"{OURS}, lean", "torch.compile", "eager"):
        assert rows[name].median
        assert rows[name].base == BARE
        assert 1e-4 < rows[name].error <= 1.1 * rows["eager"].error + 2**-9
    assert not [r for r in report.rows if r.note and r.median]


def test_the_reference_is_the_loss():
    b = loss.batch_of(TINY, "cpu")
    wide = [t.detach().double().requires_grad_() for t in b.leaves]
    value = loss.plain(*wide, b.targets)
    exact = loss.named(b, value, *torch.autograd.grad(value, wide))
    for name, t in loss.reference(b).items():
        assert (t.double() - exact[name].double()).norm() <= 1e-5 * exact[name].double().norm(), name


def test_a_wrong_one_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss, "plain", lambda x, w, t: 1.1 * torch.nn.functional.cross_entropy((x @ w.t()).float(), t))
    report = Report("loss")
    loss.loss([TINY], Settings(rounds=1, variants=("eager",)), report)
    (row,) = [r for r in report.rows if r.variant == "eager"]
    assert row.note
    assert row.median is None
