"""``linear_cross_entropy`` on the reference backend, against PyTorch in float64: every combination of its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import codetta
from codetta.errors import CodettaError, SettingsError, ShapeError, TypeMismatch, UnsupportedError
from codetta.nn import slabs
from codetta.testing import relative_error

IGNORED = -100
MODES = ("fast", "lean")


@pytest.fixture(autouse=True)
def _many_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slabs, so that a small vocabulary has several."""
    monkeypatch.setattr(slabs, "LEAN_SLAB", 1)
    monkeypatch.setattr(slabs, "OF_GRADIENT", 1 << 30)
    monkeypatch.setattr(slabs, "SLAB_GRAIN", 64)


def oracle(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    token_weights: Tensor | None = None,
    num_items_in_batch: Any = None,
) -> Tensor:
    """The same by PyTorch's own functions, in the dtype of its arguments."""
    logits = F.linear(x, weight, bias)
    logits = logits if logit_scale is None else logits * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    flat, tokens = logits.flatten(0, -2), targets.flatten().long()
    losses = F.cross_entropy(flat, tokens, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    counts = (tokens != ignore_index).to(x.dtype)
    losses = losses + counts * z_loss * flat.logsumexp(-1).square()
    if token_weights is not None:
        counts = counts * token_weights.flatten()
    losses = losses * counts
    loss = losses.reshape(targets.shape) if reduction == "none" else losses.sum()
    if num_items_in_batch is not None:
        return loss / num_items_in_batch
    return loss / counts.sum() if reduction == "mean" else loss


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call."""

    shape: tuple[int, ...]
    features: int
    columns: int
    options: dict[str, Any]
    memory: str = "auto"
    bias: bool = False
    weighted: bool = False
    index: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float64
    needs: tuple[bool, bool, bool] = (True, True, True)
    keep: bool = False
    seed: int = field(default=0, compare=False)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any combination."""
    columns = draw(st.sampled_from([3, 8, 129, 200, 257]))
    options = {
        "ignore_index": draw(st.sampled_from([IGNORED, 2, -1])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "z_loss": draw(st.sampled_from([0.0, 0.01])),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "logit_scale": draw(st.sampled_from([None, 0.5])),
        "num_items_in_batch": draw(st.sampled_from([None, 7, "tensor"])),
    }
    return Case(
        draw(st.sampled_from([(1,), (12,), (2, 9), (3, 1, 5)])),
        draw(st.sampled_from([4, 24])),
        columns,
        options,
        draw(st.sampled_from(MODES)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([torch.int32, torch.int64])),
        torch.float64,
        draw(st.sampled_from([(True, True, True), (False, True, True), (True, False, True), (True, True, False)])),
        draw(st.booleans()),
        draw(st.integers(0, 100)),
    )


def tensors(case: Case) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """x (not contiguous), weight and bias, those that need gradients marked; targets; token weights."""
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.features, *case.shape, generator=generator, dtype=torch.float64).movedim(0, -1)
    found = [x.to(case.dtype), torch.randn(case.columns, case.features, generator=generator).to(case.dtype)]
    if case.bias:
        found.append(torch.randn(case.columns, generator=generator).to(case.dtype))
    targets = torch.randint(0, case.columns, case.shape, generator=generator).to(case.index)
    ignored = torch.rand(case.shape, generator=generator) < 0.3
    targets = torch.where(ignored, case.options.get("ignore_index", IGNORED), targets).to(case.index)
    weights = torch.rand(case.shape, generator=generator, dtype=case.dtype) if case.weighted else None
    needs = [*case.needs[:2], case.needs[2]][: len(found)]
    return [t.requires_grad_(n) for t, n in zip(found, needs, strict=True)], targets, weights


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_any_combination_of_options(case: Case):
    """Loss and gradients, the weight's on target rows and on the rest apart; a second backward gives the same."""
    (x, weight, *bias), targets, weights = tensors(case)
    options = dict(case.options)
    if options["num_items_in_batch"] == "tensor":
        options["num_items_in_batch"] = torch.tensor(5)
    if weights is not None:
        options["token_weights"] = weights.requires_grad_()
    args = [t for t in (x, weight, *bias, *([] if weights is None else [weights])) if t.requires_grad]
    loss = codetta.linear_cross_entropy(x, weight, targets, *bias, memory=case.memory, **options)
    want = oracle(x, weight, targets, *bias, **options)
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12, equal_nan=True)
    if want.isnan().any():  # everything is ignored
        return
    upstream = torch.rand(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(case.seed))
    exact = torch.autograd.grad(want, args, upstream)
    for keep in (True, False) if case.keep else (False,):
        for got, g in zip(torch.autograd.grad(loss, args, upstream, retain_graph=keep), exact, strict=True):
            assert (got.shape, got.dtype) == (g.shape, g.dtype)
            torch.testing.assert_close(got, g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sure", [0.0, 1.0, 4.0])
def test_weight_gradient_on_target_rows_and_the_rest(dtype, sure, memory):
    """Rows of targets and the others are each as exact as PyTorch's, also where each target's probability is nearly
    one: what is left of one minus it is neither a rounded difference nor the rounding error of a stored logit."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(513, 32, generator=generator) / 6
    targets = torch.randint(0, 513, (96,), generator=generator)
    x = weight[targets] * 6 * sure + torch.randn(96, 32, generator=generator)
    inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
    ours = torch.autograd.grad(codetta.linear_cross_entropy(*inputs, targets, memory=memory), inputs)
    eager = torch.autograd.grad(F.cross_entropy(F.linear(*inputs).float(), targets), inputs)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = torch.autograd.grad(oracle(*wide, targets), wide)
    hit = torch.zeros(513, dtype=torch.bool)
    hit[targets] = True
    parts = [(dw[hit], dw[~hit], dx) for dx, dw in (ours, eager, exact)]
    for got, theirs, want in zip(*parts, strict=True):
        bound = (2.0 if dtype == torch.float32 else 1.1) * relative_error(
            theirs, want
        )  # float32: orders of sums differ
        assert relative_error(got, want) < bound + torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("memory", MODES)
def test_metrics(memory):
    """Log-probability, entropy and accuracy of detached logits, of any size."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (40, 300))
    targets = (x @ weight.t()).argmax(1)
    targets[::3] = torch.randint(0, 300, (14,), generator=generator)
    targets[1] = IGNORED
    loss, metrics = codetta.linear_cross_entropy(
        x.requires_grad_(), weight, targets, softcap=30.0, return_metrics=True, memory=memory
    )
    logits = (30.0 * torch.tanh(x @ weight.t() / 30.0)).detach()
    log_p = logits.log_softmax(1)
    kept = targets != IGNORED
    expected = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(~kept, 0.0)
    torch.testing.assert_close(metrics.log_probability, expected)
    torch.testing.assert_close(metrics.entropy, -(log_p.exp() * log_p).sum(1))
    torch.testing.assert_close(metrics.accuracy, (logits.argmax(1) == targets)[kept].float().mean())
    torch.testing.assert_close(loss, -expected.sum() / kept.sum())
    assert not any(m.requires_grad for m in metrics)


def problem(tokens: int = 12, columns: int = 129, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and targets."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(n, 16, generator=generator).to(dtype).requires_grad_() for n in (tokens, columns))
    return x, weight, torch.randint(0, columns, (tokens,), generator=generator)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_learn(tokens, reduction, memory):
    """C13, C27: no tokens, or all of them ignored: as PyTorch, and zero gradients."""
    x, weight, _ = problem(tokens)
    targets = torch.full((tokens,), IGNORED)
    loss = codetta.linear_cross_entropy(x, weight, targets, reduction=reduction, memory=memory)
    torch.testing.assert_close(loss, F.cross_entropy(x @ weight.t(), targets, reduction=reduction), equal_nan=True)
    for g, t in zip(torch.autograd.grad(loss.sum(), [x, weight]), (x, weight), strict=True):
        assert g.shape == t.shape
        assert not g.any()


@pytest.mark.parametrize("wrong", [129, 1 << 20, -5, -1])
def test_a_target_that_is_no_column(wrong, monkeypatch: pytest.MonkeyPatch):
    """Never a plausible number: its loss and its gradients are NaN, those of others are not; an error if checked."""
    x, weight, targets = problem()
    targets[3] = wrong
    losses, metrics = codetta.linear_cross_entropy(x, weight, targets, reduction="none", return_metrics=True)
    assert losses.isnan().tolist() == [i == 3 for i in range(12)]
    assert metrics.accuracy.isnan()
    (dx,) = torch.autograd.grad(losses.sum(), x)
    assert dx.isnan().all(1).tolist() == [i == 3 for i in range(12)]
    monkeypatch.setenv("CODETTA_CHECK", "1")
    with pytest.raises(ShapeError, match=rf"target {wrong} at token 3 is no column of a vocabulary of 129"):
        codetta.linear_cross_entropy(x, weight, targets)
    codetta.linear_cross_entropy(x, weight, targets, ignore_index=wrong)


@pytest.mark.parametrize("given", [int, torch.tensor])
def test_number_of_items_over_micro_batches(given):
    """C26: micro-batches of 3 and 9 tokens that count, divided by all 12."""
    x, weight, targets = problem(16)
    targets[[1, 2, 6, 7]] = IGNORED
    whole = torch.autograd.grad(codetta.linear_cross_entropy(x, weight, targets), weight)[0]
    parts = sum(
        torch.autograd.grad(
            codetta.linear_cross_entropy(x[s], weight, targets[s], num_items_in_batch=given(12)), weight
        )[0]
        for s in (slice(5), slice(5, 16))
    )
    assert relative_error(parts, whole.double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", MODES)
def test_autocast(memory, dtype):
    """C23: float32 parameters; gradients in their dtype, equal to autocast's own."""
    x, weight, targets = problem(64)
    bias = torch.randn(129, generator=torch.Generator().manual_seed(5)).requires_grad_()
    args = [x, weight, bias]
    with torch.autocast("cpu", dtype):
        loss = codetta.linear_cross_entropy(x, weight, targets, bias, memory=memory)
        want = F.cross_entropy(F.linear(x, weight, bias).float(), targets)
    exact = torch.autograd.grad(oracle(*(t.double() for t in (x, weight)), targets, bias.double()), args)
    for got, theirs, g in zip(torch.autograd.grad(loss, args), torch.autograd.grad(want, args), exact, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, g.double()) < 1.1 * relative_error(theirs, g.double()) + torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("memory", MODES)
def test_only_what_is_asked(memory, monkeypatch: pytest.MonkeyPatch):
    """C24: a frozen head's gradient is not computed, nor is a frozen input's; without gradients nothing is held."""
    from codetta.nn import head_run

    done: list[str] = []
    weight_gradient, add = head_run.weight_gradient, head_run.InputGradient.add
    monkeypatch.setattr(head_run, "weight_gradient", lambda *a: (done.append("weight"), weight_gradient(*a))[1])
    monkeypatch.setattr(head_run.InputGradient, "add", lambda *a: (done.append("x"), add(*a))[1])
    values = {}
    for needs in ("x", "weight", "both"):
        x, weight, targets = problem()
        x.requires_grad_(needs != "weight")
        weight.requires_grad_(needs != "x")
        loss = codetta.linear_cross_entropy(x, weight, targets, memory=memory)
        done.clear()
        loss.backward()
        values[needs] = loss.item()
        assert set(done) == ({"x", "weight"} if needs == "both" else {needs})
        assert (x.grad is None, weight.grad is None) == (needs == "weight", needs == "x")
    with torch.no_grad():
        values["no_grad"] = codetta.linear_cross_entropy(x, weight, targets, memory=memory).item()
    with torch.inference_mode():
        values["inference"] = codetta.linear_cross_entropy(x, weight, targets, memory=memory).item()
    torch.testing.assert_close(torch.tensor(list(values.values())), torch.tensor([values["x"]] * 5))


@pytest.mark.parametrize("memory", MODES)
def test_size_of_slabs(memory, monkeypatch: pytest.MonkeyPatch):
    """C19: loss and gradients do not depend on how wide a slab is, ignored tokens unevenly spread."""
    x, weight, targets = problem(512, 1001)
    targets[:300:2] = IGNORED
    found = []
    for width in (32, 1000, 4096):
        monkeypatch.setattr(slabs, "SLAB_GRAIN", width)
        loss = codetta.linear_cross_entropy(x, weight, targets, memory=memory)
        found.append([loss.detach(), *torch.autograd.grad(loss, [x, weight])])
    for other in found[1:]:
        assert all(relative_error(a, b.double()) < 1e-6 for a, b in zip(other, found[0], strict=True))


def test_an_adapter_on_the_head():
    """LoRA on a frozen head, as the weight that it makes: the adapter gets its gradient."""
    x, weight, targets = problem(24)
    down, up = (
        torch.randn(*s, generator=torch.Generator().manual_seed(2)).requires_grad_() for s in ((2, 16), (129, 2))
    )
    frozen = weight.detach()
    args = [x, down, up]
    got = torch.autograd.grad(codetta.linear_cross_entropy(x, frozen + up @ down, targets), args)
    want = torch.autograd.grad(F.cross_entropy(F.linear(x, frozen) + x @ down.t() @ up.t(), targets), args)
    assert all(relative_error(a, b.double()) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embedding(dtype):
    """C32: the gradient is the sum of both uses, in the weight's dtype."""
    _, weight, targets = problem(12, dtype=dtype)
    ids = torch.arange(12) * 3
    loss = codetta.linear_cross_entropy(F.embedding(ids, weight), weight, targets)
    (got,) = torch.autograd.grad(loss, weight)
    wide = weight.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(F.cross_entropy(F.embedding(ids, wide) @ wide.t(), targets), wide)
    (eager,) = torch.autograd.grad(F.cross_entropy((F.embedding(ids, weight) @ weight.t()).float(), targets), weight)
    assert got.dtype == dtype
    assert relative_error(got, want) < 1.1 * relative_error(eager, want) + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("memory", ["auto", *MODES])
@pytest.mark.parametrize("dynamic", [False, True])
def test_under_compile(dynamic, memory):
    """C25: as one op, with a quarter of the targets ignored, the first and the second time."""
    x, weight, targets = problem(16)
    targets[::4] = IGNORED

    def step(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return codetta.linear_cross_entropy(x, weight, targets, memory=memory)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    want = torch.autograd.grad(step(x, weight, targets), [x, weight])
    for _ in range(2):
        got = torch.autograd.grad(compiled(x, weight, targets), [x, weight])
        assert all(relative_error(a, b.double()) < 1e-6 for a, b in zip(got, want, strict=True))


def test_second_derivative_is_refused():
    """And says so; a first derivative with create_graph is right."""
    x, weight, targets = problem()
    loss = codetta.linear_cross_entropy(x, weight, targets)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    assert relative_error(dx, torch.autograd.grad(oracle(x, weight, targets), x)[0].double()) < 1e-6
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(dx.sum(), weight)


WRONG = {
    "features": (lambda x, w, t: codetta.linear_cross_entropy(x[:, :4], w, t), ShapeError),
    "tokens": (lambda x, w, t: codetta.linear_cross_entropy(x, w, t[:3]), ShapeError),
    "bias": (lambda x, w, t: codetta.linear_cross_entropy(x, w, t, w[:3, 0]), ShapeError),
    "token_weights": (lambda x, w, t: codetta.linear_cross_entropy(x, w, t, token_weights=x[0]), ShapeError),
    "targets": (lambda x, w, t: codetta.linear_cross_entropy(x, w, t.float()), TypeMismatch),
    "dtypes": (lambda x, w, t: codetta.linear_cross_entropy(x, w.double(), t), TypeMismatch),
    "reduction": (lambda x, w, t: codetta.linear_cross_entropy(x, w, t, reduction="max"), SettingsError),
    "memory": (lambda x, w, t: codetta.linear_cross_entropy(x, w, t, memory="small"), SettingsError),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_an_error_of_ours(name):
    call, kind = WRONG[name]
    assert issubclass(kind, CodettaError)
    with pytest.raises(kind):
        call(*problem())
