"""``linear_cross_entropy`` on kernels: against PyTorch in float64 and eager in bf16, in every way of holding logits;
what it takes of memory, offsets beyond 2^31, and that nothing waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import codetta
from codetta.nn import slabs
from codetta.nn.slabs import EXPONENTIALS, Sizes
from codetta.testing import relative_error
from target import DEVICE, sized

MODES = ("fast", "lean")
IGNORED = -100
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 15.0, "logit_scale": 0.5},
}


@pytest.fixture
def _many_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "LEAN_SLAB", 1)
    monkeypatch.setattr(slabs, "OF_GRADIENT", 1 << 30)


def problem(tokens: int, columns: int, features: int = 64, sure: float = 1.0, bias: bool = False) -> list[Tensor]:
    """x, weight and bias in bf16, and int64 targets, a quarter of them ignored; targets are ``sure`` of themselves."""
    generator = torch.Generator().manual_seed(tokens + columns)
    weight = torch.randn(columns, features, generator=generator) * features**-0.5
    targets = torch.randint(0, columns, (tokens,), generator=generator)
    x = weight[targets] * sure * 4 + torch.randn(tokens, features, generator=generator)
    found = [x, weight, *([torch.randn(columns, generator=generator)] if bias else [])]
    targets[1::4] = IGNORED
    return [*(t.to(DEVICE, torch.bfloat16).requires_grad_() for t in found), targets.to(DEVICE)]


def plain(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """The same in PyTorch, logits in float32 at least."""
    logits = F.linear(x, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * options.get("logit_scale", 1.0)
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    counts = targets != IGNORED
    losses = losses + options.get("z_loss", 0.0) * torch.where(counts, logits.logsumexp(-1).square(), 0.0)
    return losses.sum() / counts.sum()


def gradients(loss: Tensor, tensors: list[Tensor], **kwargs: Any) -> list[Tensor]:
    """All of them."""
    return list(torch.autograd.grad(loss, tensors, **kwargs))


def within_the_bar(found: list[Tensor], eager: list[Tensor], exact: list[Tensor], targets: Tensor) -> None:
    """Gradients as exact as eager's, the weight's on target rows and on the rest apart."""
    hit = torch.zeros(found[1].shape[0], dtype=torch.bool, device=DEVICE)
    hit[targets[targets >= 0]] = True
    for i, (got, theirs, want) in enumerate(zip(found, eager, exact, strict=True)):
        for part in (hit, ~hit) if i == 1 else (slice(None),):
            bound = 1.1 * relative_error(theirs[part], want[part]) + 2**-9
            assert relative_error(got[part], want[part]) <= bound, i


@pytest.mark.usefixtures("_many_slabs")
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens, columns", [(1, 1000), (7, 257), (129, 1001), (256, 4096)])
def test_as_exact_as_eager(tokens, columns, bias, options, memory):
    """Loss and gradients, the weight's on target rows and on the rest apart; a second backward has the first's bits, a
    graph that is given up the same numbers."""
    *args, targets = problem(tokens, columns, bias=bias)
    x, weight, *b = args
    wide = [t.detach().double().requires_grad_() for t in args]
    exact_loss = plain(*wide[:2], targets, *wide[2:], **OPTIONS[options])
    exact = gradients(exact_loss, wide)
    eager = gradients(plain(x, weight, targets, *b, **OPTIONS[options]), args)
    loss = codetta.linear_cross_entropy(x, weight, targets, *b, memory=memory, **OPTIONS[options])
    assert abs(loss.item() - exact_loss.item()) <= 4e-3 * abs(exact_loss.item())
    kept = gradients(loss, args, retain_graph=True)
    again = gradients(loss, args, retain_graph=True)
    last = gradients(loss, args)
    assert all(torch.equal(a, c) for a, c in zip(kept, again, strict=True))
    within_the_bar(kept, eager, exact, targets)
    within_the_bar(last, eager, exact, targets)


@pytest.mark.parametrize("sure, every", [(1.0, 5), (30.0, 5), (1.0, 1)])
@pytest.mark.parametrize("tokens, columns", [(201, 1000), (300, 4096), (1025, 4104)])
def test_exponentials(tokens, columns, sure, every):
    """Some rows, or all, overflow and are computed again, some targets are all but certain; a graph that is kept gives
    the same bits twice."""
    x, weight, targets = problem(tokens, columns, sure=sure)
    with torch.no_grad():
        x[::every] *= 40.0
        x[2] = 0.0
    args, wide = [x, weight], [t.detach().double().requires_grad_() for t in (x, weight)]
    exact_loss = plain(*wide, targets)
    exact = gradients(exact_loss, wide)
    eager = gradients(plain(x, weight, targets), args)
    loss = codetta.linear_cross_entropy(x, weight, targets, memory="fast")
    assert abs(loss.item() - exact_loss.item()) <= 1e-5 * abs(exact_loss.item())
    kept, again = (gradients(loss, args, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, c) for a, c in zip(kept, again, strict=True))
    assert not kept[0][targets < 0].any()
    within_the_bar(kept, eager, exact, targets)


@pytest.mark.usefixtures("_many_slabs")
@pytest.mark.parametrize("memory", MODES)
def test_metrics(memory):
    """Against the softmax of float64 logits."""
    x, weight, targets = problem(200, 1001)
    _, found = codetta.linear_cross_entropy(x, weight, targets, memory=memory, return_metrics=True)
    log_p = (x.double() @ weight.double().t()).log_softmax(1).detach()
    counts = targets != IGNORED
    picked = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    assert relative_error(found.log_probability[counts], picked[counts]) < 4e-3
    assert not found.log_probability[~counts].any()
    assert relative_error(found.entropy, -(log_p.exp() * log_p).sum(1)) < 4e-3
    hits = (log_p.argmax(1) == targets)[counts].double().mean()
    assert abs(found.accuracy.item() - hits.item()) <= 0.02  # two logits may be one when rounded


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("frozen", ["weight", "x", "both"])
def test_frozen(frozen, memory):
    """The gradient that is asked for, and the same loss."""
    x, weight, targets = problem(64, 1000)
    want = codetta.linear_cross_entropy(x, weight, targets, memory=memory)
    args = [t for t, name in ((x, "x"), (weight, "weight")) if frozen not in (name, "both")]
    x, weight = (t.detach().requires_grad_(any(t is a for a in args)) for t in (x, weight))
    loss = codetta.linear_cross_entropy(x, weight, targets, memory=memory)
    assert torch.equal(loss.detach(), want.detach()) or relative_error(loss.detach(), want.detach().double()) < 1e-3
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
        assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sure", [1.0, 8.0])
def test_other_dtypes(sure, dtype):
    """float16 by kernels, float32 by the library's GEMM and a map behind it; also where targets are all but certain."""
    x, weight, targets = problem(65, 1000, sure=sure)
    args = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in args]
    exact = gradients(plain(*wide, targets), wide)
    eager = gradients(plain(*args, targets), args)
    for memory in MODES:
        found = gradients(codetta.linear_cross_entropy(*args, targets, memory=memory), args)
        for got, theirs, want in zip(found, eager, exact, strict=True):
            eps = torch.finfo(dtype).eps
            most = 2.0 if dtype == torch.float32 else 1.1  # float32: orders of sums differ
            assert relative_error(got, want) <= most * relative_error(theirs, want) + (eps if eps > 1e-4 else 64 * eps)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_under_compile(index, memory):
    """C25: one op in a graph, the first and the second time."""
    x, weight, targets = problem(96, 1000)
    targets = targets.to(index)

    def step(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return codetta.linear_cross_entropy(x * 2.0, weight, targets, memory=memory)

    torch._dynamo.reset()
    f = torch.compile(step, fullgraph=True)
    want = gradients(step(x, weight, targets), [x, weight])
    for _ in range(2):
        got = gradients(f(x, weight, targets), [x, weight])
        assert all(relative_error(a, b.double()) < 2**-7 for a, b in zip(got, want, strict=True))


@contextmanager
def never_waiting() -> Iterator[None]:
    """Whoever waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("memory", MODES)
def test_nothing_waits_for_the_gpu(memory):
    """C26: with a count of items on the GPU, ignored targets and metrics."""
    x, weight, targets = problem(256, 4096)
    items = torch.tensor(100, device=DEVICE)
    for run in range(2):
        with never_waiting() if run else torch.no_grad():
            loss, _ = codetta.linear_cross_entropy(
                x, weight, targets, memory=memory, num_items_in_batch=items, return_metrics=True
            )
            if run:
                loss.backward()
        if not run:  # compiles
            codetta.linear_cross_entropy(
                x, weight, targets, memory=memory, num_items_in_batch=items, return_metrics=True
            )[0].backward()
    assert x.grad is not None


@pytest.mark.usefixtures("free_memory")
@pytest.mark.parametrize("memory", MODES)
def test_offsets_beyond_32_bits(memory):
    """C12: with the weight frozen and all logits in one tensor, the last row is the row computed alone."""
    tokens, columns = sized(17_000, 40), sized(128_256, 1000)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(columns, 64, generator=generator, device=DEVICE) / 8).bfloat16()
    targets = torch.randint(0, columns, (tokens,), generator=generator, device=DEVICE)
    losses = codetta.linear_cross_entropy(x, weight, targets, reduction="none", memory=memory)
    (dx,) = torch.autograd.grad(losses.sum(), x)
    alone = x.detach()[-3:].requires_grad_()
    last = codetta.linear_cross_entropy(alone, weight, targets[-3:], reduction="none", memory=memory)
    (d_alone,) = torch.autograd.grad(last.sum(), alone)
    torch.testing.assert_close(losses[-3:], last, rtol=1e-4, atol=1e-4)
    assert relative_error(dx[-3:], d_alone.double()) < 2**-6


@pytest.mark.usefixtures("cuda_only", "free_memory")
@pytest.mark.parametrize("features, memory", list(product((2048, 4096, 8192), MODES)))
def test_peak_of_memory(features, memory):
    """What the model of memory says, to 24 MiB; the same sizes as the table of the README."""
    x, weight = (torch.randn(n, features, device=DEVICE, dtype=torch.bfloat16) for n in (8192, 128_256))
    weight.mul_(features**-0.5)
    args = [t.requires_grad_() for t in (x, weight)]
    targets = torch.randint(0, 128_256, (8192,), device=DEVICE)
    sizes = Sizes(8192, features, 128_256)
    for _ in range(2):  # the first compiles, and takes cuBLAS's workspace
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autograd.set_multithreading_enabled(False):  # no thread that lets go of memory some time later
            found = gradients(codetta.linear_cross_entropy(*args, targets, memory=memory), args)
        taken = torch.cuda.max_memory_allocated() - before
        del found
    expected = slabs.peak(sizes, slabs.slabs(sizes, EXPONENTIALS if memory == "fast" else memory, True))
    assert abs(taken - expected) <= 24 << 20, (taken / 2**30, expected / 2**30)
