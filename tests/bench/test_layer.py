"""The layer and the launch level on a CPU: who takes part, that all are right, that a wrong one is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from codetta.bench import contenders, layer
from codetta.bench.contenders import BARE, OURS
from codetta.bench.kernels import Settings
from codetta.bench.launch import BASE, launch
from codetta.bench.layer import BOTH, FORWARD, Entrant, check, reference, setting_of, shared_of
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


# --- contenders that write over what they are given -------------------------------------------------------------------


class _InPlace(torch.autograd.Function):
    """RoPE as Liger's kernels do it: on q, k and, backward, on the very memory of the incoming gradients."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return tuple(_turn(t, cos, sin) for t in (q.clone(), k.clone()))

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return (*(_turn(t, cos, -sin) for t in (dq, dk)), None, None)


def _turn(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = t.chunk(2, -1)
    return t.copy_(t * cos[:, :, None] + torch.cat([-b, a], -1) * sin[:, :, None])


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    found = _InPlace.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return tuple(t.transpose(1, 2) for t in found)


@pytest.mark.usefixtures("all_peers")
def test_a_peer_that_works_in_place_spoils_nobody_elses_inputs(monkeypatch: pytest.MonkeyPatch):
    liger = sys.modules["liger_kernel.transformers.functional"]
    in_place = SimpleNamespace(**{**vars(liger), "liger_rope": _rope})
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", in_place)
    report = Report("layer")
    layer.layer([TINY], replace(QUICK, variants=("Liger", "eager")), report)
    assert {r.variant for r in report.rows if r.note} <= {"Liger, compiled"}  # Dynamo may not take this Function
    assert all(r.median for r in report.rows if r.variant in ("Liger", "eager"))

    s = setting_of(TINY, "cpu")
    expected, given = reference(s)
    shared, liger_one = shared_of(s, given), contenders.liger(s, compile_it=False)
    with pytest.raises(VerifyError, match="Liger wrote over the gradient of q, the gradient of k, which"):
        Entrant.of(replace(liger_one, writes=False), given).check(expected, shared)
    assert Entrant.of(contenders.eager(s), given).check(expected, shared) < 1e-2


@pytest.mark.parametrize("spoiled, first_off", [("cos", "q"), ("norm2.weight", "q"), ("x", "x2"), ("o.weight", "x2")])
def test_who_writes_is_named_and_the_next_one_finds_the_inputs_as_they_were(spoiled: str, first_off: str):
    """Without that the next one gets the blame, from the first output on that the tensor leads to."""
    s = setting_of(TINY, "cpu")
    expected, given = reference(s)
    shared = shared_of(s, given)

    def spoil() -> None:
        with torch.no_grad():
            shared.tensors[spoiled].mul_(200)

    class Spoiler(contenders.Contender):
        def step(self, given: Any) -> Any:
            found = super().step(given)
            spoil()
            return found

    one = contenders.eager(s)
    with pytest.raises(VerifyError, match=f"bad one wrote over {spoiled}, which"):
        Entrant.of(Spoiler("bad one", one.forward, one.wrt), given).check(expected, shared)
    wrong = Spoiler("bad one", lambda: {n: t * 1.1 for n, t in one.forward().items()}, one.wrt)
    with pytest.raises(VerifyError, match=f"x2 is .* off .*; and it wrote over {spoiled}"):
        Entrant.of(wrong, given).check(expected, shared)
    assert Entrant.of(contenders.eager(s), given).check(expected, shared) < 1e-2
    spoil()
    with pytest.raises(VerifyError, match=f"eager: {first_off} is"):
        check(contenders.eager(s), given, expected)


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
