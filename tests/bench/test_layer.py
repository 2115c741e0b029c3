"""The layer and the launch level on a CPU: who takes part, that all are right, that a wrong one is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from codetta.bench import contenders, layer
from codetta.bench.contenders import BARE, OURS
from codetta.bench.kernels import Settings
from codetta.bench.launch import BASE, launch
from codetta.bench.layer import BOTH, FORWARD, check, reference, setting_of
from codetta.bench.report import Report
from codetta.bench.shapes import SHAPES
from codetta.errors import VerifyError

TINY = SHAPES["tiny"]
QUICK = Settings(rounds=1)


@pytest.mark.usefixtures("all_peers")
def test_everybody_takes_part_and_is_held_against_the_bare_gemms():
    report = Report("layer")
    layer.layer([TINY], QUICK, report)
    assert not [r.note for r in report.rows if r.note]
    for case in (FORWARD, BOTH):
        rows = {r.variant: r for r in report.rows if r.case == case}
        assert rows.keys() == {BARE, *layer.MAKERS}
        assert all(r.median and r.base == BARE for r in rows.values())
        assert rows[BARE].ratio == 1.0
        # in bfloat16 everybody is some roundings away from float32, and ours not further than eager
        assert 1e-3 < rows[OURS].error <= rows["eager"].error < 1e-2


def test_a_wrong_contender_is_refused():
    s = setting_of(TINY, "cpu")
    expected, given = reference(s)
    eager = contenders.eager(s)
    check(eager, given, expected)
    off = replace(eager, forward=lambda: {n: t * (1.02 if n == "k" else 1) for n, t in eager.forward().items()})
    with pytest.raises(VerifyError, match="k is"):
        check(off, given, expected)
    lost = replace(eager, forward=lambda: {n: t.detach() if n == "q" else t for n, t in eager.forward().items()})
    with pytest.raises((VerifyError, RuntimeError)):
        check(lost, given, expected)


def test_the_bare_gemms_are_those_of_the_segment(monkeypatch: pytest.MonkeyPatch):
    """4 forward, 12 with backward, with the segment's number of operations."""
    s = setting_of(TINY, "cpu")
    flops: list[int] = []
    real = torch.mm

    def counted(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert out.shape == (a.shape[0], b.shape[1])
        flops.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    q, kv, _ = TINY.qkv
    weights = q * TINY.d + 3 * TINY.d * TINY.ffn + TINY.d * (q + 2 * kv)
    contenders.bare(s, backward=False)()
    assert (len(flops), sum(flops)) == (4, 2 * TINY.tokens * weights)
    contenders.bare(s, backward=True)()
    assert (len(flops), sum(flops)) == (4 + 12, 4 * 2 * TINY.tokens * weights)


def test_launch_times_of_forward_with_and_without_gradients():
    report = Report("launch")
    launch([replace(TINY, tokens=8)], QUICK, report, calls=3)
    assert not [r.note for r in report.rows if r.note]
    assert {r.case for r in report.rows} == {"training forward", "inference forward"}
    assert all(r.median and r.base == BASE for r in report.rows)


def test_only_what_is_asked_for_is_made():
    report = Report("layer")
    layer.layer([TINY], replace(QUICK, only=(FORWARD + " + ",), variants=("eager",)), report)
    assert {(r.case, r.variant) for r in report.rows} == {(BOTH, BARE), (BOTH, OURS), (BOTH, "eager")}
