"""Conditions that broke others, on ``linear_cross_entropy`` itself: each named by its number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import codetta
from codetta.nn.head_run import Call, What
from codetta.nn.slabs import Sizes, slabs
from codetta.testing import relative_error

MODES = ("fast", "lean")


def problem(tokens: int, columns: int, features: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and targets."""
    generator = torch.Generator().manual_seed(columns)
    x, weight = (torch.randn(n, features, generator=generator).requires_grad_() for n in (tokens, columns))
    bias = torch.randn(columns, generator=generator).requires_grad_()
    return x, weight, bias, torch.randint(0, columns, (tokens,), generator=generator)


def test_offsets_beyond_32_bits():
    """C12: where a slab's logits lie in lent memory, without the memory."""
    tokens, features, columns = 20_000, 20_000, 128_256
    x, weight, memory = (
        torch.empty(s, device="meta") for s in ((tokens, features), (columns, features), columns * features)
    )
    call = Call(What(1.0, None, "lean", True), x, weight, torch.empty(tokens, dtype=torch.int32, device="meta"))
    held = slabs(Sizes(tokens, features, columns, 4, fused=False), "lean", True)
    last = call.lent(memory, held[-1])
    assert held[-1].how == "lent"
    assert last.storage_offset() == held[-1].start * 20_000 > 2**31
    assert last.storage_offset() + last.numel() <= memory.numel()


@pytest.mark.parametrize("memory", MODES)
def test_every_token_weighs_its_own_upstream_value(memory):
    """C20: reduction none, the first token ignored; weight and bias need gradients too."""
    x, weight, bias, targets = problem(5, 257)
    targets[0] = -100
    upstream = torch.tensor([1, 2, 0, 0.5, 3])
    losses = codetta.linear_cross_entropy(x, weight, targets, bias, reduction="none", memory=memory)
    got = torch.autograd.grad(losses, [x, weight, bias], upstream)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = F.cross_entropy(F.linear(*wide), targets, reduction="none")
    for g, want in zip(got, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        assert relative_error(g, want) < 1e-5
    assert losses[0] == 0.0
    assert not got[0][[0, 2]].any()


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("columns", [257, 1001, 129_920])
def test_logits_near_minus_a_hundred(columns, memory):
    """C21: a log-probability is never above 0, and what fills up the last tile takes no probability."""
    x, weight, _, targets = problem(5, columns, 8)
    low = torch.full((columns,), -100.0)
    losses, found = codetta.linear_cross_entropy(
        x, weight, targets, low, reduction="none", return_metrics=True, memory=memory
    )
    exact = F.cross_entropy(F.linear(x.double(), weight.double(), low.double()), targets, reduction="none")
    torch.testing.assert_close(losses, exact.float(), rtol=1e-5, atol=1e-5)
    assert bool((losses >= 0).all())
    assert bool((found.log_probability <= 0).all())


@pytest.mark.parametrize("memory", MODES)
def test_large_bias(memory):
    """C22: the loss is not negative and the reference's; the bias's gradient is the sum over the tokens."""
    x, weight, bias, targets = problem(12, 1001)
    large = (bias.detach() * 50).requires_grad_()
    targets[:4] = large.argmax()  # all but certain
    loss = codetta.linear_cross_entropy(x, weight, targets, large, reduction="sum", memory=memory)
    (got,) = torch.autograd.grad(loss, large)
    z = F.linear(x.double(), weight.double(), large.double()).detach()
    assert loss >= 0
    assert relative_error(loss.detach(), F.cross_entropy(z, targets, reduction="sum")) < 1e-6
    exact = z.softmax(1).sum(0) - torch.bincount(targets, minlength=1001)
    assert relative_error(got, exact) < 1e-5
