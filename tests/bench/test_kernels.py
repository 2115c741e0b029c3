"""The kernel level on a CPU: every case runs, is checked, has its baselines; what is wrong is not timed."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from codetta.bench import kernels, plain
from codetta.bench.baselines import BARE, COPY
from codetta.bench.check import accumulator, checked
from codetta.bench.kernels import Settings, measured
from codetta.bench.report import OURS, Report
from codetta.bench.shapes import EPS, SHAPES, Head, Segment, build, head_batch, segment_batch
from codetta.bench.steps import Case, cases_of, compile_module, enlarged
from codetta.errors import VerifyError

TINY = SHAPES["tiny"]
QUICK = Settings(rounds=1)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    """All steps of the segment and of the head."""
    found: dict[str, Case] = {}
    for kind, batch in ((Segment, segment_batch), (Head, head_batch)):
        module = compile_module(build(kind, TINY, "cpu"), batch(TINY, "cpu"), "balanced")
        found |= {c.name: c for c in cases_of(module, TINY.tokens)}
    return found


def test_the_programs_of_a_layer_are_all_there(cases: dict[str, Case]):
    assert {
        "o: residual, partial RMS",
        "gate+up: SwiGLU",
        "down: residual, partial RMS",
        "q+k+v: RoPE",
        "q+k+v: norm backward",
        "gate+up: norm backward",
        "down: SwiGLU backward",
        "head: log-sum-exp",
        "o: data gradient",
        *(f"{w}: weight gradient" for w in ("o", "gate+up", "down", "q+k+v", "head")),
    } <= cases.keys()
    kinds = {c.step.kind for c in cases.values()}
    assert kinds == {"gemm", "finalize", "leftover"}


def test_a_run_has_a_time_for_everything_but_absent_peers(tmp_path):
    report = Report("kernels", tmp_path)
    settings = Settings(rounds=1, only=("down", "finalize", "head: log", "leftover"))
    kernels.kernels([TINY], settings, report)
    assert report.ok
    timed = {(r.case, r.variant): r for r in report.rows if r.median}
    assert timed["down: SwiGLU backward", OURS].ratio is not None
    assert timed["down: SwiGLU backward", OURS].base == BARE
    assert {"compile, stacked", "compile, interleaved"} <= {v for c, v in timed if c == "down: SwiGLU backward"}
    assert {v for c, v in timed if c == "finalize of c1, large"} == {OURS, COPY}
    absent = {r.variant for r in report.rows if not r.median}
    assert absent <= {"Liger", "Liger, compiled", "FlashInfer", "QuACK"}
    assert all(r.note for r in report.rows if not r.median)
    assert (tmp_path / "kernels.json").is_file()


# --- the kernels' own way of running a step ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind, batch", [(Segment, segment_batch), (Head, head_batch)])
def test_steps_run_alone_as_kernels_do(kind: Any, batch: Any, monkeypatch: pytest.MonkeyPatch):
    """Places, views, parts of reductions: everything around the kernels, which are emulated."""
    if find_spec("quack") is None or find_spec("triton") is None:
        pytest.skip("the kernels' packages are not installed")
    import_module("standin").stand_in(monkeypatch)
    module = compile_module(build(kind, TINY, "cpu"), batch(TINY, "cpu"), "balanced")
    names = []
    with np.errstate(all="ignore"):  # what numpy warns of, a GPU computes
        for case in cases_of(module, TINY.tokens, "hopper"):
            for one in (case, *([enlarged(case, 2**14)] if case.step.kind == "finalize" else [])):
                checked(one, one.runner(), accumulator(one))
                names.append(one.name)
    assert any("large" in n for n in names)


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["down: SwiGLU backward", "q+k+v: norm backward", "leftover of t, c"])
@pytest.mark.parametrize("spoil", [1.02, float("nan")])
def test_a_wrong_result_is_refused_and_not_timed(
    cases: dict[str, Case], name: str, spoil: float, monkeypatch: pytest.MonkeyPatch
):
    case, right = cases[name], Case.runner

    def wrong(self: Case) -> Any:
        run, store = right(self), self.step.stores[-1]
        return lambda: {b: t * spoil if b == store else t for b, t in run().items()}

    monkeypatch.setattr(Case, "runner", wrong)
    rows = {r.variant: r for r in measured(case, TINY, QUICK)}
    assert rows[OURS].median is None
    assert "off its program" in rows[OURS].note
    assert next(r for v, r in rows.items() if v in (BARE, COPY)).median


def test_a_program_that_is_not_what_its_name_says_is_refused(cases: dict[str, Case]):
    case = cases["gate+up: SwiGLU"]
    other = replace(case, roles={"rstd": case.roles["rstd"] * 1.1})
    with pytest.raises(VerifyError, match="as plain PyTorch has it"):
        checked(other, other.runner(), accumulator(other))


def test_plain_expressions_agree_with_autograd():
    """SwiGLU's backward in both layouts, and the norm's, against PyTorch in float64."""
    torch.manual_seed(0)
    z, g = torch.randn(5, 12, dtype=torch.float64, requires_grad=True), torch.randn(5, 6, dtype=torch.float64)
    y = plain.swiglu(z)["y"]
    (want,) = torch.autograd.grad(y, z, g)
    found = plain.swiglu_backward(g, z.detach())
    torch.testing.assert_close(found["dz"], want)
    torch.testing.assert_close(found["inner"], (want * z).sum(-1).detach())
    pairs = plain.swiglu_backward_interleaved(g, plain.interleaved(z.detach(), 1))
    torch.testing.assert_close(pairs["dz"], plain.interleaved(want, 1))

    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    gain, dh = torch.randn(8, dtype=torch.float64, requires_grad=True), torch.randn(5, 8, dtype=torch.float64)
    rstd = torch.rsqrt(x.square().mean(-1) + EPS)
    want_x, want_gain = torch.autograd.grad(x * rstd[:, None] * gain, (x, gain), dh)
    acc, scale = dh * rstd[:, None], rstd.detach()
    c = -((dh * x * gain).sum(-1) * scale**3 / 8).detach()
    found = plain.norm_backward(acc.detach(), x.detach(), c, gain.detach())
    torch.testing.assert_close(found["dx"], want_x)
    torch.testing.assert_close(found["dgain"], want_gain)


# --- peers, played by PyTorch -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_peers")
@pytest.mark.parametrize(
    "name, expected",
    [
        ("o: residual, partial RMS", {"Liger", "Liger, compiled", "FlashInfer", "QuACK"}),
        ("gate+up: SwiGLU", {"Liger", "Liger, compiled", "FlashInfer", "QuACK"}),
        ("q+k+v: RoPE", {"Liger", "Liger, compiled"}),
        ("down: SwiGLU backward", {"QuACK"}),
        ("head: log-sum-exp", {"QuACK"}),
    ],
)
def test_peers_are_checked_and_timed(cases: dict[str, Case], name: str, expected: set[str]):
    rows = {r.variant: r for r in measured(cases[name], TINY, QUICK)}
    assert expected <= rows.keys()
    for peer in expected:
        assert rows[peer].median, rows[peer].note
        assert rows[peer].error is not None


def test_a_wrong_peer_is_refused(cases: dict[str, Case], all_peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    right = all_peers.silu_and_mul
    monkeypatch.setattr(all_peers, "silu_and_mul", lambda x, out: right(x * 1.05, out))
    rows = {r.variant: r for r in measured(cases["gate+up: SwiGLU"], TINY, QUICK)}
    assert rows["FlashInfer"].median is None
    assert "y is" in rows["FlashInfer"].note
