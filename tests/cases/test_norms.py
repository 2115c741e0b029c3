"""Norms and residuals between GEMMs: widths, dtypes, layouts and sizes that made other fused norms wrong."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from ways import agree, backward_plans, compiled, counts, errors, forward_plans, fresh, randn, run, wide

from codetta.capture.backend import recording
from codetta.core.types import f32
from codetta.testing import Bar, relative_error

WIDTHS = [1, 7, 8, 17, 769, 1000, 1001, 3420, 3584, 5003]
EPS = 1e-6


class Llama(nn.Module):
    """RMSNorm as transformers' Llama spells it: float32 inside, rounded to the activation's dtype before the gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = wide(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * h.to(x.dtype)


class Offset(nn.Module):
    """RMSNorm as Gemma spells it: the gain is 1 + weight, added in float32, and rounded after the gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        h = wide(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return (h * (1.0 + wide(self.weight))).type_as(x)


class Whole(nn.RMSNorm):
    """RMSNorm as one operator of PyTorch's."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPS)


class Layer(nn.LayerNorm):
    """LayerNorm with a bias."""


NORMS = [Llama, Offset, Whole, Layer]
RMS_NORMS = [Llama, Whole]


class Between(nn.Module):
    """A norm between two linears: the first one's epilogue adds the residual and makes the statistic."""

    def __init__(self, width: int, norm: type[nn.Module] = Llama, inner: int = 24, out: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(inner, width, bias=False), nn.Linear(width, out, bias=False)
        self.norm = norm(width)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = residual + self.a(x)
        return x, self.b(self.norm(x))


class Before(nn.Module):
    """A norm of an input, in front of a linear: a leftover makes the statistic, as at the start of a model."""

    def __init__(self, width: int, norm: type[nn.Module] = Llama, out: int = 16) -> None:
        super().__init__()
        self.norm, self.b = norm(width), nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(x))


class Gated(nn.Module):
    """SwiGLU: gate and up share their input, down takes their product."""

    def __init__(self, inner: int, width: int = 16) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


def pair(rows: int, inner: int, width: int, dtype: torch.dtype = torch.float32, scale: float = 1.0):
    """Draws the inputs of ``Between``."""

    def draw(generator: torch.Generator) -> list[Tensor]:
        x, residual = (torch.randn(rows, n, generator=generator) for n in (inner, width))
        return [x.to(dtype).requires_grad_(), (residual * scale).to(dtype).requires_grad_()]

    return draw


@pytest.mark.parametrize("norm", RMS_NORMS)
def test_sum_of_squares_is_float32_from_the_first_product(norm):
    """C01: a float16 row of 4096 values, all 300: its squares overflow float16. The norm is 1."""
    module = Before(4096, norm).half()
    with torch.no_grad():
        module.norm.weight.fill_(1.0)
        got = compiled(module)(torch.full((3, 4096), 300.0, dtype=torch.float16))
        expected = module.b(torch.ones(3, 4096, dtype=torch.float16))
    assert relative_error(got, expected.double()) < 1e-3


@pytest.mark.parametrize("norm", RMS_NORMS)
def test_sum_of_squares_is_float32_in_an_epilogue(norm):
    """C01: the same row, made by a GEMM with a residual, whose epilogue sums the squares."""
    module = Between(4096, norm).half()
    with torch.no_grad():
        module.norm.weight.fill_(1.0)
        module.a.weight.zero_()
        module.a.weight[:, 0] = 100.0
        x = torch.zeros(3, 24, dtype=torch.float16)
        x[:, 0] = 1.0
        with recording() as found:
            stream, got = compiled(module)(x, torch.full((3, 4096), 200.0, dtype=torch.float16))
        expected = module.b(torch.ones(3, 4096, dtype=torch.float16))
    assert torch.equal(stream, torch.full_like(stream, 300.0))
    assert relative_error(got, expected.double()) < 1e-3
    assert counts(forward_plans(found)) == {"gemms": 2, "epilogues": 2, "finalizes": 1, "leftovers": 0}


@pytest.mark.parametrize("norm", RMS_NORMS)
def test_divisor_is_the_full_width_once(norm):
    """C02: hidden 5003 over tiles of 128, the last one ragged: a row of twos has the norm 1."""
    module = Between(5003, norm)
    with torch.no_grad():
        module.norm.weight.uniform_(0.5, 1.5)
        module.a.weight.zero_()
        _, got = compiled(module)(torch.randn(2, 24), torch.full((2, 5003), 2.0))
        expected = module.b.double()(module.norm.weight.double().expand(2, -1))
    assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize("width", WIDTHS)
def test_widths_of_a_norm(width):
    """C02, C03: norms of every width, whose statistic is combined from tiles of 128 columns, the last one ragged."""
    found = agree(Between(width), pair(6, 24, width), seeds=3, gemms=2)
    assert counts(forward_plans(found)) == {"gemms": 2, "epilogues": 2, "finalizes": 1, "leftovers": 0}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("width", [1, 17, 1001])
def test_widths_of_every_norm(norm, width):
    """C03: each spelling of a norm at a width of 1, at one below a tile, and at an odd one above."""
    agree(Between(width, norm), pair(6, 24, width), seeds=3, gemms=2)


@pytest.mark.parametrize("width", WIDTHS)
def test_widths_of_a_glu(width):
    """C03: SwiGLU of every width. Its down-projection has width 16."""
    found = agree(Gated(width), randn(6, 16), seeds=3, gemms=2)
    assert counts(forward_plans(found))["leftovers"] == 0


MIXED = [
    (Llama, torch.bfloat16, torch.float32, torch.float32),
    (Llama, torch.float32, torch.bfloat16, torch.float32),
    (Offset, torch.bfloat16, torch.float32, torch.bfloat16),
    (Offset, torch.float32, torch.bfloat16, torch.float32),
    (Whole, torch.bfloat16, torch.float32, torch.bfloat16),
    (Whole, torch.float32, torch.bfloat16, torch.float32),
    (Layer, torch.bfloat16, torch.float32, torch.bfloat16),
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("norm, activation, gain, result", MIXED)
def test_gain_of_another_dtype(norm, activation, gain, result):
    """C04: bfloat16 activations with a float32 gain, and the reverse; the gain is a ramp. The norm's dtype is the one
    that PyTorch gives (spelled out: the promoted one; as one operator: the activation's), the gain's gradient has the
    gain's."""
    module = Between(40, norm)
    module.a.to(activation)
    module.norm.to(gain)
    module.b.to(result)

    def ramp(m: nn.Module, seed: int) -> None:
        fresh(m, seed)
        with torch.no_grad():
            m.norm.weight.copy_(torch.linspace(0.5, 2.5, 40) + seed)

    found = agree(module, pair(6, 24, 40, activation), prepare=ramp, gemms=2)
    _, y = compiled(module)(*pair(6, 24, 40, activation)(torch.Generator()))
    assert y.dtype is result
    assert found[0].capture.segments


@pytest.mark.parametrize("module", [Between(4096), Before(4096)], ids=["between", "before"])
def test_saved_row_statistic_is_float32(module):
    """C05: bfloat16 at hidden 4096. What is kept of a row is float32, and dx is as near to float64 as eager's."""
    module = module.bfloat16()
    draw = pair(8, 24, 4096, torch.bfloat16) if isinstance(module, Between) else randn(8, 4096, dtype=torch.bfloat16)
    found = agree(module, draw, seeds=3)
    kept = [s.forward.buffers[s.forward_buffer(o)] for o in saved(found)] if False else saved(found)
    assert kept
    assert all(t.dtype is f32 for t in kept if t.cols is None)


def saved(found):
    """The types of what backward is given beside inputs and cotangents."""
    return [s.training.backward.buffers[name] for g in found for _, s in g.compiled() for name, _ in s.training.saved]
