"""The accuracy bar passes what is rounded well and rejects the same computation with a term left out."""

import math

import pytest
import torch
from torch import Tensor

from codetta.testing import Bar, Errors, geometric_mean, pooled, relative_error

BAR = Bar()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * gain


def rms_norm_gradient(x: Tensor, gain: Tensor, eps: float, g: Tensor, *, projection: bool = True) -> Tensor:
    """dx by hand; ``projection=False`` leaves out the term that comes from the statistic."""
    r = torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    dh = g * gain
    inner = (dh * x).mean(1, keepdim=True) * r * r if projection else 0.0
    return r * (dh - x * inner)


def errors_of(got: Tensor, eager: Tensor, reference: Tensor) -> Errors:
    return Errors(relative_error(got, reference), relative_error(eager, reference), eager.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rejects_the_same_kernel_with_a_term_left_out(dtype):
    torch.manual_seed(0)
    x, g = torch.randn(64, 96).to(dtype), torch.randn(64, 96).to(dtype)
    gain = (0.5 + torch.rand(96)).to(dtype)
    leaf = x.double().requires_grad_()
    rms_norm(leaf, gain.double(), 1e-5).backward(g.double())
    eager = x.clone().requires_grad_()
    rms_norm(eager, gain, 1e-5).backward(g)
    wide = (x.float(), gain.float(), 1e-5, g.float())  # float32 arithmetic, one rounding: as a program does it
    right = errors_of(rms_norm_gradient(*wide).to(dtype), eager.grad, leaf.grad)
    wrong = errors_of(rms_norm_gradient(*wide, projection=False).to(dtype), eager.grad, leaf.grad)
    assert BAR.why_not(right) is None
    assert "is allowed" in str(BAR.why_not(wrong))
    assert BAR.why_not_all([right]) is None or dtype is torch.float32  # in float32 both do the same
    assert BAR.why_not_all([wrong]) is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_rounded_once_is_above_the_least_error_that_counts(dtype):
    x = torch.randn(100, 100, dtype=torch.float64)
    eighth = torch.finfo(dtype).eps / 8
    assert eighth < relative_error(x.to(dtype), x) < 2 * eighth


@pytest.mark.parametrize(
    "ours, eager, ratio",
    [(0.0, 0.0, 1.0), (1e-12, 0.0, 1.0), (0.0, 1e-12, 1.0), (2e-3, 1e-3, 2.0), (math.inf, 1e-3, math.inf)],
)
def test_ratio(ours, eager, ratio):
    assert Errors(ours, eager, torch.bfloat16).ratio == pytest.approx(ratio)


def test_against_zeros_only_zeros_are_right():
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros) == 0.0
    wrong = Errors(relative_error(zeros + 1e-30, zeros), 0.0, torch.float32)
    assert wrong.ours == math.inf
    assert BAR.why_not(wrong)


def test_nan_is_only_right_where_the_reference_is_nan():
    nan, one = torch.tensor(float("nan")), torch.tensor(1.0)
    assert relative_error(nan, nan) == 0.0
    assert relative_error(nan, one) == math.inf
    assert relative_error(one, nan) == math.inf
    inf = torch.tensor([float("inf"), 2.0])
    assert relative_error(inf, inf) == 0.0
    assert relative_error(inf, torch.tensor([1.0, 2.0])) == math.inf


def test_half_a_unit_is_allowed_on_top():
    eps = torch.finfo(torch.float32).eps
    assert BAR.why_not(Errors(0.5 * eps, 0.0, torch.float32)) is None
    assert BAR.why_not(Errors(0.51 * eps, 0.0, torch.float32))


def test_the_mean_may_be_above_one_by_its_own_noise_only():
    ratios = [0.97, 1.05, 0.99, 1.04, 1.0, 1.01]  # as in float32, where both sides round equally often
    assert BAR.why_not_all([Errors(r, 1.0, torch.float32) for r in ratios]) is None
    assert BAR.why_not_all([Errors(1.05 * r, 1.0, torch.float32) for r in ratios])
    assert BAR.why_not_all([Errors(1.01, 1.0, torch.float32)] * 6)


def test_geometric_mean():
    assert geometric_mean([]) == 1.0
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert BAR.why_not_all([Errors(1.01, 1.0, torch.float32)])


def test_a_scalar_is_one_draw_a_seed():
    pair = Errors(2e-6, 1e-6, torch.float32)
    assert BAR.why_not(pair)
    assert BAR.why_not(Errors(2e-6, 1e-6, torch.float32, is_scalar=True)) is None
    wrong = Errors(6e-6, 1e-6, torch.float32, is_scalar=True)
    assert BAR.why_not(wrong)
    assert BAR.why_not_all([wrong]) is None


def test_seeds_are_pooled_by_geometric_means():
    seeds = [Errors(2.0, 1.0, torch.float32), Errors(8.0, 1.0, torch.float32)]
    assert pooled(seeds).ours == pytest.approx(4.0)
    assert pooled(seeds).eager == pytest.approx(1.0)


def test_a_seed_at_which_a_sum_cancels_does_not_decide():
    seeds = [Errors(1e-6, 1e-6, torch.float32)] * 4 + [Errors(3e-4, 2e-4, torch.float32)]
    assert BAR.why_not(pooled(seeds)) is None


def test_one_wrong_seed_of_five_is_seen():
    for wrong in (2e-6, 1.0, math.inf):
        seeds = [Errors(1e-6, 1e-6, torch.float32)] * 4 + [Errors(wrong, 1e-6, torch.float32)]
        assert (BAR.why_not(pooled(seeds)) is None) is (wrong == 2e-6)
    assert BAR.why_not_all([pooled(seeds)])


def test_exact_results_stay_exact():
    assert pooled([Errors(0.0, 0.0, torch.float32)] * 5) == Errors(0.0, 0.0, torch.float32)
    mixed = pooled([Errors(0.0, 1e-6, torch.float32), Errors(0.0, 1e-6, torch.float32)])
    assert (mixed.ours, mixed.eager) == (0.0, pytest.approx(1e-6))


def test_what_is_exactly_zero_is_judged_as_noise():
    """The gradient of a key's bias behind softmax: float64 has 1e-17 there, and both sides have their roundings."""
    assert BAR.why_not(Errors(2e9, 1e9, torch.float32)) is None
    assert BAR.why_not(Errors(1e12, 1e9, torch.float32))
    assert BAR.why_not(Errors(0.9, 0.5, torch.float32))
