"""The head that holds exponentials of its logits, on the reference backend: against PyTorch in float64, also where a
target is all but certain, where exponentials overflow, and where there is no target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codetta import linear_cross_entropy
from codetta.core.types import bf16, f16
from codetta.nn import exponentials, head_ops
from codetta.nn.head_graphs import LSE, TARGET, TOTAL, Head
from codetta.nn.linear_cross_entropy import mode_of
from codetta.nn.slabs import EXPONENTIALS, Sizes
from codetta.testing import relative_error

COLUMNS, FEATURES = 264, 32
CPU = torch.device("cpu")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a head was held so."""
    calls: list[int] = []
    inner = exponentials.forward
    monkeypatch.setattr(exponentials, "forward", lambda call: (calls.append(1), inner(call))[1])
    return calls


def problem(seed: int, tokens: int = 150, size: float = 1.0, sure: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """x and weight in bf16 with logits of about ``size``, and targets that are ``sure`` of themselves; every fourth is
    ignored."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(COLUMNS, FEATURES, generator=generator) * FEATURES**-0.5
    targets = torch.randint(COLUMNS, (tokens,), generator=generator)
    x = size * torch.randn(tokens, FEATURES, generator=generator) + sure * weight[targets]
    targets[1::4] = -100
    return x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets


def plain(x: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, z_loss: float = 0.0) -> Tensor:
    """The losses of tokens, 0 of an ignored one, in the dtype of the arguments and float32 at least."""
    logits = F.linear(x, weight)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * scale
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses + z_loss * torch.where(targets >= 0, logits.logsumexp(1).square(), 0.0)


def parts(dx: Tensor, dw: Tensor, targets: Tensor) -> list[Tensor]:
    """The gradients, the weight's on target rows and on the others apart."""
    hit = torch.zeros(COLUMNS, dtype=torch.bool)
    hit[targets[targets >= 0]] = True
    return [dx, dw[hit], dw[~hit]]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([0.1, 1.0, 8.0, 60.0]),
    sure=st.sampled_from([0.0, 6.0, 40.0]),
    scale=st.sampled_from([1.0, 0.5]),
    z_loss=st.sampled_from([0.0, 1e-3]),
    reduction=st.sampled_from(["mean", "none"]),
    twice=st.booleans(),
)
def test_loss_and_gradients(seed, size, sure, scale, z_loss, reduction, twice):
    """From tiny logits to those of which most exponentials overflow. Logits are nowhere rounded, so the loss is
    float32's; a second backward, with another gradient, is as good as the first."""
    x, weight, targets = problem(seed, size=size, sure=sure)
    found = linear_cross_entropy(
        x, weight, targets, memory="fast", logit_scale=scale, z_loss=z_loss, reduction=reduction
    )
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact, largest = plain(*wide, targets, scale, z_loss), float(F.linear(*wide).detach().abs().max())
    generator = torch.Generator().manual_seed(seed)
    for factor in (1.0, -3.0) if twice else (1.0,):
        g = factor * (torch.rand(len(targets), generator=generator) if reduction == "none" else torch.ones(()))
        eager = plain(x, weight, targets, scale, z_loss)
        if reduction == "mean":
            exact, eager = exact.sum() / (targets >= 0).sum(), eager.sum() / (targets >= 0).sum()
        torch.testing.assert_close(found.detach().double(), exact.detach(), rtol=3e-6, atol=3e-7 * largest)
        args = {"grad_outputs": g, "retain_graph": True}
        want = torch.autograd.grad(exact, wide, g.double(), retain_graph=True)
        bound = torch.autograd.grad(eager, (x, weight), g)
        got = torch.autograd.grad(found, (x, weight), **args)
        assert not got[0][targets < 0].any()
        for a, b, c in zip(*(parts(*t, targets) for t in (got, bound, want)), strict=True):
            assert relative_error(a, c) < max(1.1 * relative_error(b, c) + 2**-9, 1e-6)
        exact = plain(*wide, targets, scale, z_loss)


def test_a_target_that_is_all_but_certain(held):
    """One minus its probability is formed in float32, before anything is rounded; no loss is below 0 (C21)."""
    x, weight, targets = problem(3, sure=24.0, size=0.0)
    (dx,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets, memory="fast"), x)
    wide = x.detach().double().requires_grad_()
    exact = plain(wide, weight.detach().double(), targets)
    probability = (-exact[targets >= 0]).exp().detach()
    assert 1e-12 < float((1 - probability).median()) < 1e-4
    (want,) = torch.autograd.grad(exact.sum() / (targets >= 0).sum(), wide)
    assert held
    assert (linear_cross_entropy(x, weight, targets, memory="fast", reduction="none") >= 0).all()
    rows = targets >= 0
    for got, expected, p in zip(dx[rows], want[rows], probability, strict=True):
        assert relative_error(got, expected) < 8e-3 + 6e-7 / float(1 - p)


@pytest.mark.parametrize("needs", ["x", "weight"])
def test_one_gradient_alone(needs, held):
    """A frozen head, and frozen features below it."""
    x, weight, targets = problem(5)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = torch.autograd.grad(plain(*wide, targets).sum(), wide)[needs == "weight"]
    (x if needs == "weight" else weight).requires_grad_(False)
    loss = linear_cross_entropy(x, weight, targets, memory="fast", reduction="sum")
    (got,) = torch.autograd.grad(loss, x if needs == "x" else weight)
    assert held == [1]
    assert relative_error(got, want) < 4e-3


def test_a_target_that_is_no_column():
    """NaN, in its loss, in its row and in the weight's gradient; never a plausible number."""
    x, weight, targets = problem(7)
    targets[2] = COLUMNS
    losses = linear_cross_entropy(x, weight, targets, memory="fast", reduction="none")
    dx, dw = torch.autograd.grad(losses.sum(), (x, weight))
    assert losses.isnan().nonzero()[:, 0].tolist() == [2]
    assert dx.isnan().all(1).nonzero()[:, 0].tolist() == [2]
    assert dw.isnan().all()


def test_only_the_targets_logit_has_a_gradient():
    """As nobody's loss is, but the op may be asked: the log-sum-exp's gradient is no number to divide by."""
    x, weight, targets = problem(9)
    index = targets.clamp(min=-1).to(torch.int32)
    what = head_ops.What(1.0, None, EXPONENTIALS, False).text
    _, target = torch.ops.codetta.head([x, weight, index], what, f"{LSE},{TARGET}")
    got = torch.autograd.grad(target.sum(), (x, weight))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    picked = F.linear(*wide).gather(1, index.clamp(min=0).long()[:, None])[:, 0]
    want = torch.autograd.grad(picked[index >= 0].sum(), wide)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 4e-3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, held):
    """Two equal calls in one graph, each with a matrix of its own; the graph is kept, then given up."""
    x, weight, targets = problem(11)

    def losses(x: Tensor, weight: Tensor) -> Tensor:
        first, second = (linear_cross_entropy(x, weight, targets, memory="fast") for _ in range(2))
        return first + 3.0 * second.square()

    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    one = plain(*wide, targets).sum() / (targets >= 0).sum()
    want = torch.autograd.grad(one + 3.0 * one.square(), wide)
    torch._dynamo.reset()
    found = torch.compile(losses, backend=backend)(x, weight)
    for keeps in (True, False):
        for a, b in zip(torch.autograd.grad(found, (x, weight), retain_graph=keeps), want, strict=True):
            assert relative_error(a, b) < 4e-3
    assert held == [1, 1]


def test_nothing_is_written_of_what_is_given(held):
    """x, weight and targets are as before."""
    x, weight, targets = problem(13, size=60.0)
    before = [t.detach().clone() for t in (x, weight, targets)]
    torch.autograd.grad(linear_cross_entropy(x, weight, targets, memory="fast"), (x, weight))
    assert held
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, targets), strict=True))


PLAIN = (LSE, TARGET)


def test_exponentials_borrow_nothing():
    """At sizes where all logits would be lent, `auto` counts them for a device that does not tell its memory."""
    sizes = Sizes(8192, 8192, 128_256)
    assert mode_of(Head(8192, bf16), PLAIN, sizes, "auto", True, CPU) == "lean"
    assert mode_of(Head(8192, f16), PLAIN, sizes, "auto", True, CPU) == "fast"


@pytest.mark.parametrize(
    "head, names, sizes, lends, mode",
    [
        (Head(32, bf16), PLAIN, Sizes(150, 32, 264), True, EXPONENTIALS),
        (Head(32, bf16, None, 0.5), PLAIN, Sizes(150, 32, 264), False, EXPONENTIALS),
        (Head(32, f16), PLAIN, Sizes(150, 32, 264), False, "fast"),
        (Head(32, bf16, bf16), PLAIN, Sizes(150, 32, 264), False, "fast"),
        (Head(32, bf16, None, 1.0, 30.0), PLAIN, Sizes(150, 32, 264), False, "fast"),
        (Head(32, bf16), (*PLAIN, TOTAL), Sizes(150, 32, 264), False, "fast"),
        (Head(32, bf16), PLAIN, Sizes(150, 32, 257), False, "fast"),
        (Head(32, bf16), PLAIN, Sizes(0, 32, 264), False, "fast"),
    ],
)
def test_who_is_held_so(head: Head, names: Any, sizes: Sizes, lends: bool, mode: str):
    """Where the gradient of a row is a factor of the row but for one entry, in a dtype that reaches far enough."""
    assert mode_of(head, names, sizes, "fast", lends, CPU) == mode
    assert mode_of(head, names, sizes, "lean", lends, CPU) == "lean"
