"""The conditions that broke others, on kernels: the bodies of tests/cases where ``ways.agree`` brings everything to the
device, written out in bfloat16 where they do not. C10 to C13, C28 and C31 are in test_running, whole models in
test_models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cases import test_loss as loss
from cases import test_norms as norms
from cases import test_random as other
from cases import test_rope as rope
from cases.modules import INPUTS, Block, Calls, Deep, half
from codetta.capture.backend import recording
from codetta.testing import relative_error
from target import DEVICE
from ways import agree, backward_plans, compiled, counts, forward_plans, fresh, kernels

HEADS = ("never", "always")  # a loss head of ours, or the model's own logits
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


# --- norms, residual, numerics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", norms.RMS_NORMS)
def test_sum_of_squares_is_float32(norm):
    """C01: a float16 row of 4096 values, all 300, as an input and made by a GEMM with a residual: the norm is 1."""
    between, before = (made(4096, norm).half().to(DEVICE) for made in (norms.Between, norms.Before))
    with torch.no_grad():
        for module in (between, before):
            module.norm.weight.fill_(1.0)
        between.a.weight.zero_()
        between.a.weight[:, 0] = 100.0
        x = torch.zeros(3, 24, dtype=F16, device=DEVICE)
        x[:, 0] = 1.0
        stream, got = compiled(between)(x, torch.full((3, 4096), 200.0, dtype=F16, device=DEVICE))
        alone = compiled(before)(torch.full((3, 4096), 300.0, dtype=F16, device=DEVICE))
    assert torch.equal(stream, torch.full_like(stream, 300.0))
    for module, y in ((between, got), (before, alone)):
        exact = module.b.weight.double().sum(1).expand(3, -1)
        assert relative_error(y, exact) < 1e-3


@pytest.mark.parametrize("width", [1, 8, 1000, 1001, 5003])
def test_widths_of_a_norm(width: int):
    """C02, C03."""
    norms.test_widths_of_a_norm(width, BF16)


@pytest.mark.parametrize("width", [1, 1000, 3420])
def test_widths_of_a_glu(width: int):
    """C03."""
    norms.test_widths_of_a_glu(width, BF16)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("norm, activation, gain, result", [norms.MIXED[i] for i in (0, 1, 2)])
def test_gain_of_another_dtype(norm, activation, gain, result):
    """C04: the gain is a ramp, its gradient is in its own dtype."""
    module = norms.Between(40, norm)
    for part, dtype in ((module.a, activation), (module.norm, gain), (module.b, result)):
        part.to(dtype)

    def ramp(m: nn.Module, seed: int) -> None:
        fresh(m, seed)
        with torch.no_grad():
            m.norm.weight.copy_(torch.linspace(0.5, 2.5, 40) + seed)

    agree(module, norms.pair(48, 24, 40, activation), prepare=ramp, gemms=2)


@pytest.mark.parametrize("place", ["between", "before"])
def test_saved_row_statistic_is_float32(place: str):
    """C05."""
    norms.test_saved_row_statistic_is_float32(place)


def test_offset_gain():
    """C06: the offset is added in float32, and backward multiplies by 1 + w."""
    norms.test_offset_is_added_in_float32(BF16)


def test_offset_of_zero():
    """C06: a gain of 1 + 0 is a gain of 1."""
    norms.test_offset_of_zero_is_a_plain_norm(BF16, 2**-8)


def test_gain_gradient_over_many_rows():
    """C08: 16,384 rows of one sign: the error of the gain's gradient does not grow with the number of rows."""
    module = norms.Before(256).bfloat16()
    fresh(module, 0)
    with torch.no_grad():
        module.b.weight.abs_()
    ours, found = compiled(module.to(DEVICE)), {}
    for rows in (256, 16_384):
        generator = torch.Generator().manual_seed(rows)
        x, g = ((0.5 + torch.rand(rows, n, generator=generator)).to(DEVICE, BF16) for n in (256, 16))
        oracle = copy.deepcopy(module).double()
        (exact,) = torch.autograd.grad(oracle(x.double()), oracle.norm.weight, g.double())
        (got,) = torch.autograd.grad(ours(x), module.norm.weight, g)
        found[rows] = relative_error(got, exact)
    assert found[16_384] <= max(1.1 * found[256], 0.25 * 2**-7)


@pytest.mark.parametrize("norm, first", [(norms.Llama, True), (norms.Whole, False)])
def test_whether_rounding_or_the_gain_comes_first(norm, first: bool):
    """C09."""
    norms.test_whether_rounding_or_the_gain_comes_first(norm, first)


def test_sum_inside_the_graph():
    """C10."""
    norms.test_sum_inside_the_graph()


@pytest.mark.parametrize("shape", [(1,), (2, 3)])
@pytest.mark.parametrize("sliced", ["outside", "inside"])
def test_column_slice_that_keeps_its_parents_row_stride(sliced: str, shape: tuple[int, ...]):
    """C11, in float32."""
    norms.test_column_slice_that_keeps_its_parents_row_stride(shape, sliced)


@pytest.mark.parametrize(
    "name, dtype", [("gelu_tanh", BF16), ("gelu_tanh", F32), ("gelu", BF16), ("silu", F16), ("silu", BF16)]
)
def test_activations_far_from_zero(name: str, dtype: torch.dtype):
    """C14."""
    norms.test_activations_far_from_zero(name, dtype)


@pytest.mark.parametrize("place", ["between", "before"])
def test_residual_stream_of_large_float16(place: str):
    """C33."""
    norms.test_residual_stream_of_large_float16(norms.Llama, place)


def test_float32_behind_a_bfloat16_gemm():
    """C04: a float32 norm and head behind a bfloat16 GEMM."""
    norms.test_float32_behind_a_bfloat16_gemm()


# --- RoPE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", rope.PAIRINGS[:2])
def test_keys_are_rotated_too(rotate):
    """C15."""
    rope.test_keys_are_rotated_too(rotate, BF16)


@pytest.mark.parametrize("size, rotate", [(80, rope.halves), (96, rope.adjacent_complex)])
def test_head_sizes(size: int, rotate):
    """C03: heads of 80 and of 96, which do not divide a tile of 128 columns."""
    module = rope.Projected(rotate, heads=3, groups=2, size=size).bfloat16()
    found = agree(module, rope.tokens(2, torch.arange(75), size, BF16), gemms=1)
    assert counts(forward_plans(found))["leftovers"] == 1


@pytest.mark.parametrize("shape", ["sample", "shared", "plain"])
def test_tables_of_every_shape(shape: str):
    """C16: cosines and sines per sample, shared, and without a batch."""
    positions = torch.arange(75).flip(0)
    given = {"sample": positions.expand(2, -1), "shared": positions[None], "plain": positions}[shape]
    agree(rope.Projected(rope.halves).bfloat16(), rope.tokens(2, given, 16, BF16), gemms=1)


def test_packed_positions():
    """C18: positions that are not monotonic."""
    rope.test_packed_positions(rope.halves, BF16)


# --- loss head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
def test_parts_of_a_batch(reduction: str):
    """C19."""
    loss.test_parts_of_a_batch(reduction, BF16, 2**-8)


@pytest.mark.parametrize("narrow", [BF16, F16])
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_with_float32_parameters(narrow: torch.dtype, bias: bool):
    """C23."""
    for logits in HEADS:
        loss.test_autocast_with_float32_parameters(logits, narrow, bias)


def test_float16_under_a_gradient_scaler():
    """C23."""
    loss.test_float16_under_a_gradient_scaler()


@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
def test_a_quarter_ignored(reduction: str):
    """C25."""
    for logits in HEADS:
        loss.test_a_quarter_ignored(logits, reduction, BF16, loss.IGNORED)


def test_a_class_of_the_vocabulary_ignored():
    """C25."""
    for logits in HEADS:
        loss.test_a_quarter_ignored(logits, "mean", BF16, 3)


def test_every_token_weighs_its_own_upstream_value():
    """C20: reduction none, the first token ignored, upstream gradients of its own for each token."""
    module = loss.Head(bias=True, reduction="none").bfloat16()
    upstream = [torch.tensor([1, 2, 0, 0.5, 3])]
    agree(module, loss.batch(5, ignored=slice(1), dtype=BF16), upstream=upstream, gemms=1)
    x, targets = (t.detach().to(DEVICE) for t in loss.batch(5, ignored=slice(1), dtype=BF16)(torch.Generator()))
    losses = compiled(module)(x.requires_grad_(), targets)
    (dx,) = torch.autograd.grad(losses, x, upstream[0].to(DEVICE, losses.dtype))
    assert losses[0] == 0.0
    assert not dx[[0, 2]].any()
    assert all(dx[i].any() for i in (1, 3, 4))


@pytest.mark.parametrize("vocabulary", [257, 129_920])
def test_vocabulary_that_is_no_multiple_of_a_tile(vocabulary: int):
    """C21: logits near -100 in float32: a log-probability is never above 0."""
    loss.test_vocabulary_that_is_no_multiple_of_a_tile(vocabulary)


@pytest.mark.parametrize("vocabulary", [1001, 129_920])
def test_low_logits(vocabulary: int):
    """C21: the same in bfloat16, by a bias: the columns that fill up the last tile take no probability."""
    module = loss.Head(vocabulary, bias=True, reduction="none").bfloat16().to(DEVICE)
    fresh(module, 0)
    with torch.no_grad():
        module.head.bias.sub_(100.0)
        x, targets = (t.detach().to(DEVICE) for t in loss.batch(96, 24, vocabulary, dtype=BF16)(torch.Generator()))
        losses = compiled(module)(x, targets)
        exact = copy.deepcopy(module).double()(x.double(), targets)
        eager = module(x, targets)
    assert bool((losses >= 0).all())
    assert relative_error(losses, exact) <= 1.1 * relative_error(eager, exact) + 2**-8


def test_large_bias_over_several_tiles_of_the_vocabulary():
    """C22."""
    for logits in HEADS:
        loss.test_large_bias_over_several_tiles_of_the_vocabulary(logits, BF16)


@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
def test_all_targets_ignored(reduction: str):
    """C27: the mean is NaN with gradients of zero, the sum is 0, single losses are zeros."""
    module = loss.Head(bias=True, reduction=reduction).bfloat16().to(DEVICE)
    fresh(module, 0)
    x, targets = (t.detach().to(DEVICE) for t in loss.batch(ignored=slice(None), dtype=BF16)(torch.Generator()))
    x.requires_grad_()
    found = compiled(module)(x, targets)
    gradients = torch.autograd.grad(found.sum(), [x, *module.parameters()])
    assert bool(found.isnan()) if reduction == "mean" else not found.any()
    assert all(not g.any() for g in gradients)


def test_tied_embedding():
    """C32."""
    loss.test_tied_embedding(BF16)


# --- gradients that are asked for, modes ------------------------------------------------------------------------------

SOME = [(n,) for n in INPUTS] + [("weight", "gain"), ("input", "residual", "bias")]


@pytest.mark.parametrize("asked", SOME, ids="+".join)
def test_exactly_the_gradients_that_are_asked_for(asked: tuple[str, ...]):
    """C24: some of the combinations: those gradients and no others, and no GEMM in vain."""
    module = Block().bfloat16()
    named = {"weight": module.linear.weight, "bias": module.linear.bias, "gain": module.norm.weight}
    for name, p in named.items():
        p.requires_grad_(name in asked)

    def drawn(generator: torch.Generator) -> list[Tensor]:
        xs = [torch.randn(150, 24, generator=generator).to(BF16) for _ in range(2)]
        return [x.requires_grad_(name in asked) for x, name in zip(xs, INPUTS[:2], strict=True)]

    found = agree(module, drawn, gemms=1)
    (plan,) = backward_plans(found)
    through = not {"input", "residual", "gain"}.isdisjoint(asked)
    assert plan.count("gemm") == ("weight" in asked) + through


def test_modes_without_gradients():
    """C24: training, evaluation, no_grad and inference_mode give the same bits; where no gradient is asked for, nothing
    is kept for one."""
    module = Deep().bfloat16().to(DEVICE)
    fresh(module, 0)
    x = torch.randn(150, 24, device=DEVICE, dtype=BF16)
    targets = torch.randint(0, 65, (150,), device=DEVICE)
    trained = compiled(module)(x.requires_grad_(), targets)
    x = x.detach()
    results = [compiled(module.eval())(x, targets)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), recording() as found:
            results.append(compiled(module)(x, targets))
        assert all(s.wrt == () for g in found for _, s in g.compiled())
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, trained, strict=True))


@pytest.mark.parametrize("used", ["loss", "stream", "both"])
def test_outputs_without_a_gradient(used: str):
    """C24: of two outputs only one is differentiated, or both: what no gradient reaches has None, as in PyTorch; and a
    model trained after it was evaluated."""
    module = Deep().bfloat16().to(DEVICE)
    fresh(module, 0)
    x, targets = torch.randn(150, 24, device=DEVICE, dtype=BF16), torch.randint(0, 65, (150,), device=DEVICE)
    ours, leaves = compiled(module), [x, *module.parameters()]
    with torch.no_grad():
        ours(x, targets)
    x.requires_grad_()

    def gradients(f: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor | None, ...]:
        found, stream = f(x, targets)
        total = {"loss": found, "stream": stream.square().sum(), "both": found + stream.square().sum()}[used]
        return torch.autograd.grad(total, leaves, allow_unused=True)

    for a, b in zip(gradients(ours), gradients(module), strict=True):
        assert (a is None) == (b is None)
        assert a is None or relative_error(a, b) < 2**-5


@pytest.mark.parametrize("frozen", ["weights", "all"])
def test_frozen_weights(frozen: str):
    """C24: a model whose weights want no gradient, and a call in which nothing does."""
    module = Deep().bfloat16().to(DEVICE).requires_grad_(False)
    fresh(module, 0)
    x = torch.randn(150, 24, device=DEVICE, dtype=BF16).requires_grad_(frozen == "weights")
    targets = torch.randint(0, 65, (150,), device=DEVICE)
    with recording() as found:
        total, stream = compiled(module)(x, targets)
    expected, theirs = module(x, targets)
    assert relative_error(stream, theirs) < 2**-6
    assert total.requires_grad == stream.requires_grad == (frozen == "weights")
    if frozen == "all":
        assert all(s.wrt == () for g in found for _, s in g.compiled())
        return
    (dx,), (want,) = (torch.autograd.grad(t, x) for t in (total, expected))
    assert relative_error(dx, want) < 2**-5
    assert backward_plans(found)[0].count("gemm") == 5  # no weight's gradient


# --- the ops ----------------------------------------------------------------------------------------------------------


def test_opcheck():
    """C29: PyTorch's own check of both ops: nothing is mutated or aliased, fakes equal what is computed."""
    module = half(Deep()).to(DEVICE)
    fresh(module, 0)
    x = torch.randn(7, 24, device=DEVICE, dtype=BF16, requires_grad=True)
    targets = torch.randint(0, 65, (7,), device=DEVICE)
    torch._dynamo.reset()
    # Inductor would not compile under the mode that collects
    calls = Calls(inner="eager", kernels=kernels(), logits="never")
    total, stream = torch.compile(module, backend=calls.backend, fullgraph=True)(x, targets)
    with calls:
        (total + stream.square().sum()).backward()
    calls.check()


def test_token_counts():
    """C29, C13: 0, 1 and other numbers of tokens, in any order: one plan for all of them."""
    module = Deep().bfloat16().to(DEVICE)
    fresh(module, 0)
    ours = compiled(module)
    with recording() as found:
        for tokens in (23, 40, 64, 1, 7, 0, 33, 1, 0, 500):
            x = torch.randn(tokens, 24, device=DEVICE, dtype=BF16, requires_grad=True)
            targets = torch.randint(0, 65, (tokens,), device=DEVICE)
            total, stream = ours(x, targets)
            (total.nan_to_num() + stream.square().sum()).backward()
            expected, theirs = module(x.detach(), targets)
            torch.testing.assert_close(total, expected, equal_nan=True, rtol=2**-6, atol=0.0)
            assert relative_error(stream, theirs.double()) < 2**-6
            assert x.grad is not None
            assert x.grad.shape == x.shape
    assert len(found) == 4
    assert len({id(s) for g in found for _, s in g.compiled()}) == 1


def test_adapter():
    """C34: a low-rank adapter on a frozen linear."""
    other.test_modules_of_other_kinds(other.Adapted, BF16)


def test_saturated_loss():
    """C21, C22: one logit far above all others: the loss is 0 or the exact distance, never negative, never NaN."""
    weight = torch.zeros(257, 24, device=DEVICE, dtype=BF16)
    weight[3] = 8.0
    x = torch.ones(5, 24, device=DEVICE, dtype=BF16, requires_grad=True)
    targets = torch.tensor([3, 0, 256, 3, 1], device=DEVICE)

    def f(x: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight).float(), targets, reduction="none")

    losses = compiled(f)(x)
    assert losses.tolist() == [0.0, 192.0, 192.0, 0.0, 192.0]
    (dx,) = torch.autograd.grad(losses.sum(), x)
    assert bool(dx.isfinite().all())
    assert not dx[[0, 3]].any()
