"""Rotary position embeddings: pairings, head sizes, tables of every shape, long and packed sequences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from codetta.capture.backend import recording
from ways import agree, backward_plans, compiled, counts, forward_plans, fresh, llama, whole_model_agrees, wide

PACKED = [0, 1, 2, 3, 0, 1, 0, 5, 9, 2]


def angles(positions: Tensor, size: int, base: float = 1e4) -> Tensor:
    """(..., size / 2) in float64."""
    return positions.double()[..., None] / base ** (torch.arange(0, size, 2).double() / size)


def tables(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of both halves, as Hugging Face has them."""
    found = torch.cat([angles(positions, size)] * 2, -1)
    return found.cos(), found.sin()


# --- the rotations; heads are (batch, heads, tokens, size) ------------------------------------------------------------


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face: x * cos + rotate_half(x) * sin, the two halves of a head paired."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def adjacent_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Meta: adjacent columns are a complex number, multiplied by another."""
    half = x.shape[-1] // 2
    pairs = torch.view_as_complex(wide(x).unflatten(-1, (half, 2)))
    turned = pairs * torch.complex(wide(cos[..., :half]), wide(sin[..., :half]))
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def adjacent_real(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in real arithmetic: even and odd columns."""
    half = x.shape[-1] // 2
    cos, sin, a, b = cos[..., :half], sin[..., :half], x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
PAIRINGS = [halves, adjacent_complex, adjacent_real]


class Projected(nn.Module):
    """A norm's q, k and v, of which q and k are rotated, then attention if asked for."""

    def __init__(self, rotate: Rotate, heads: int = 2, groups: int = 1, size: int = 16, attends: bool = False) -> None:
        super().__init__()
        self.rotate, self.size, self.attends = rotate, size, attends
        self.norm = nn.RMSNorm(24, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(24, n * size, bias=False) for n in (heads, groups, groups))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(x)
        q, k, v = (f(h).view(*h.shape[:-1], -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        cos, sin = (t.unsqueeze(1) if t.dim() == 3 else t for t in (cos, sin))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        if self.attends:
            return (functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),)
        return q, k, v


def tokens(batch: int, positions: Tensor, size: int, dtype: torch.dtype = torch.float32):
    """Draws an input, and brings the tables for its positions: (T,), (1, T) or (batch, T)."""

    def draw(generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(batch, positions.shape[-1], 24, generator=generator).to(dtype).requires_grad_()
        return [x, *(t.to(dtype) for t in tables(positions, size))]

    return draw


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rotate", PAIRINGS)
def test_keys_are_rotated_too(rotate, dtype):
    """C15: 2 query heads and 1 key head of 128, 2 tokens: one GEMM, whose epilogue rotates q and k and leaves v."""
    module = Projected(rotate, heads=2, groups=1, size=128).to(dtype)
    found = agree(module, tokens(2, torch.tensor([3, 7]), 128, dtype), gemms=1)
    assert counts(forward_plans(found)) == {"gemms": 1, "epilogues": 1, "finalizes": 0, "leftovers": 1}
    assert counts(backward_plans(found))["gemms"] == 2


@pytest.mark.parametrize("rotate", PAIRINGS)
def test_attention_sees_rotated_keys(rotate):
    """C15: the same through attention, where a key that is not rotated would only show in the scores."""
    module = Projected(rotate, heads=2, groups=1, size=128, attends=True)
    agree(module, tokens(1, torch.tensor([3, 7]), 128), gemms=1)


@pytest.mark.parametrize("rotate", PAIRINGS)
@pytest.mark.parametrize("size", [2, 80, 96])
def test_head_sizes(rotate, size):
    """C03: heads of 80 and of 96, which do not divide a tile of 128 columns, and of 2."""
    module = Projected(rotate, heads=3, groups=2, size=size).double()
    found = agree(module, tokens(2, torch.arange(5), size, torch.float64), seeds=2, gemms=1)
    assert counts(forward_plans(found))["leftovers"] == 1


@pytest.mark.parametrize("rotate", PAIRINGS)
def test_tables_of_every_shape(rotate):
    """C16: cosines and sines per sample (2, T, D), shared (1, T, D), and without a batch (T, D): each is understood,
    and where the positions agree so do the results, to the bit."""
    module = Projected(rotate)
    fresh(module, 0)
    positions = torch.tensor([5, 0, 3, 9])
    given = {"sample": positions.expand(2, -1), "shared": positions[None], "plain": positions}
    found = {}
    for name, p in given.items():
        draw = tokens(2, p, 16)
        graphs = agree(module, draw, gemms=1)
        assert counts(forward_plans(graphs)) == {"gemms": 1, "epilogues": 1, "finalizes": 0, "leftovers": 1}, name
        fresh(module, 0)
        x, cos, sin = draw(torch.Generator().manual_seed(9))
        outputs = compiled(module)(x, cos, sin)
        found[name] = [*outputs, *torch.autograd.grad([y.square().sum() for y in outputs], [x, *module.parameters()])]
    for name in ("shared", "plain"):
        assert all(torch.equal(a, b) for a, b in zip(found[name], found["sample"], strict=True)), name


@pytest.mark.parametrize("rotate", PAIRINGS)
def test_positions_that_differ_between_samples(rotate):
    """C16: a table per sample whose samples do differ."""
    agree(Projected(rotate), tokens(2, torch.tensor([[5, 0, 3, 9], [1, 8, 2, 2]]), 16), gemms=1)


class Long(nn.Module):
    """A projection and its rotation, the table made by transformers' own module, inside the compiled graph."""

    def __init__(self, positions: int, size: int = 16) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=size, num_attention_heads=1, max_position_embeddings=positions)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
        self.table, self.q = LlamaRotaryEmbedding(config), nn.Linear(8, size, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.table(wide(x), positions)
        return cos, halves(self.q(x), cos, sin)


@pytest.mark.parametrize("positions, bound", [(8192, 1e-3), (65_536, 5e-3)])
def test_phase_is_float32(positions, bound):
    """C17: base 1e4, a model cast to bfloat16, autocast on: the phase is float32. A q of (1, ..., 0, ...) turns into
    the cosines and sines themselves."""
    module = Long(positions)
    frequencies = module.table.inv_freq.clone()
    module = module.bfloat16()
    module.table.inv_freq = frequencies  # loading a model in bfloat16 leaves it; `.bfloat16()` does not, also in eager
    with torch.no_grad():
        module.q.weight.zero_()
        module.q.weight[:8, 0] = 1.0
    x = torch.zeros(1, positions, 8, dtype=torch.bfloat16)
    x[..., 0] = 1.0
    place = torch.arange(positions)[None]
    with recording() as found, torch.autocast("cpu", torch.bfloat16):
        cos, rotated = compiled(module)(x, place)
    exact = torch.cat([angles(place, 16).cos(), angles(place, 16).sin()], -1)
    assert cos.dtype is torch.float32
    assert (cos.double() - torch.cat([exact[..., :8]] * 2, -1)).abs().max() < bound
    assert (rotated.double() - exact).abs().max() < bound
    assert counts(forward_plans(found))["epilogues"] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rotate", PAIRINGS)
def test_packed_positions(rotate, dtype):
    """C18: positions 0,1,2,3,0,1,0,5,9,2: each token uses its own, backward too."""

    class Gathered(Projected):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            return super().forward(x, cos[positions], sin[positions])

    def draw(generator: torch.Generator) -> list[Tensor]:
        inputs = tokens(2, torch.arange(10), 16, dtype)(generator)
        return [*inputs, torch.tensor([PACKED, PACKED[::-1]])]

    found = agree(Gathered(rotate).to(dtype), draw, gemms=1)
    assert counts(forward_plans(found))["leftovers"] == 1


def test_packed_positions_equal_each_token_alone():
    """C18: the rotation of each token, and its gradient, written out by hand in float64."""
    module = Projected(halves, heads=1, groups=1).double()
    fresh(module, 0)
    x, cos, sin = tokens(1, torch.tensor(PACKED), 16, torch.float64)(torch.Generator().manual_seed(1))
    q, _, _ = compiled(module)(x, cos, sin)
    g = torch.randn(q.shape, dtype=torch.float64)
    (dx,) = torch.autograd.grad(q, x, g)
    for t, position in enumerate(PACKED):
        phase = angles(torch.tensor(position), 16)
        block = torch.block_diag(*[p.new_tensor([[p.cos(), -p.sin()], [p.sin(), p.cos()]]) for p in phase])
        order = torch.arange(16).view(2, 8).T.flatten()  # (a0, b0, a1, b1, ...): the pairs side by side
        turn = torch.zeros(16, 16, dtype=torch.float64)
        turn[order[:, None], order] = block
        h = x[0, t].detach().requires_grad_()
        y = turn @ module.q(module.norm(h))
        torch.testing.assert_close(q[0, 0, t], y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dx[0, t], torch.autograd.grad(y, h, g[0, 0, t])[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_positions_in_a_whole_model(dtype):
    """C18: a Llama of transformers with such position ids, against the captured graph in float64."""
    model = llama(dtype=dtype)
    ids = torch.randint(0, 128, (2, 10), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([PACKED, PACKED[::-1]])
    whole_model_agrees(model, {"input_ids": ids, "labels": ids, "position_ids": positions})
