"""Random modules that are no Llama: whatever they are made of, they compile and are right."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from codetta.capture.backend import recording
from codetta.testing import relative_error
from ways import agree, compiled, fresh, run, unwritten_memory_is_nan

WIDTHS = (4, 6, 8, 12, 16)
GEMMS = (["linear"], ["matmul"], ["mm"], ["addmm"])
BOUND = 1e-8  # in float64, against PyTorch in float64: chains of norms and exponentials lose some digits

Step = Callable[[Sequence[Tensor]], Tensor]


class RandomModule(nn.Module):
    """Steps drawn one after the other, each of which works on the values of earlier ones.

    ``widths`` are those of the values so far; ``forward`` gives the last value and some of the others."""

    def __init__(self, random: Random, rank: int) -> None:
        super().__init__()
        self.random, self.rank = random, rank
        self.parts = nn.ModuleList()
        self.vectors = nn.ParameterList()
        self.widths = [random.choice(WIDTHS)]
        self.steps: list[Step] = [self.linear(0)]
        for _ in range(random.randrange(1, 11)):
            at = len(self.widths) - 1 if random.random() < 0.7 else random.randrange(len(self.widths))
            self.steps.append(random.choice(KINDS)(self, at))
        last = len(self.steps)
        self.returned = [last, *(i for i in range(1, last) if random.random() < 0.15)]
        for p in self.parameters():
            p.requires_grad_(random.random() < 0.85)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step in self.steps:
            values.append(step(values))
        return tuple(values[i] for i in self.returned)

    # --- what a step is made of ---------------------------------------------------------------------------------------

    def part(self, module: nn.Module) -> nn.Module:
        self.parts.append(module)
        return module

    def vector(self, *shape: int) -> int:
        self.vectors.append(nn.Parameter(torch.ones(shape)))
        return len(self.vectors) - 1

    def partner(self, width: int) -> int | None:
        """An earlier value of the same width."""
        found = [i for i, w in enumerate(self.widths) if w == width]
        return self.random.choice(found) if found else None

    # --- steps --------------------------------------------------------------------------------------------------------

    def linear(self, at: int) -> Step:
        """A linear, written in one of several ways."""
        width, out = self.widths[at], self.random.choice(WIDTHS)
        self.widths.append(out)
        how = self.random.choice(["module", "module", "matmul", "transposed", "addmm"])
        if how == "module":
            module = self.part(nn.Linear(width, out, bias=self.random.random() < 0.4))
            return lambda v: module(v[at])
        w = self.vector(width, out) if how != "transposed" else self.vector(out, width)
        if how == "addmm" and self.rank == 2:
            b = self.vector(out)
            return lambda v: torch.addmm(self.vectors[b], v[at], self.vectors[w])
        return lambda v: v[at] @ (self.vectors[w].T if how == "transposed" else self.vectors[w])

    def siblings(self, at: int) -> Step:
        """Several linears of one value, combined."""
        width, out = self.widths[at], self.random.choice(WIDTHS)
        self.widths.append(out)
        a, b = (self.part(nn.Linear(width, out, bias=self.random.random() < 0.3)) for _ in range(2))
        combine = self.random.choice([torch.mul, torch.add, lambda x, y: functional.silu(x) * y])
        return lambda v: combine(a(v[at]), b(v[at]))

    def shared(self, at: int) -> Step:
        """One linear used twice."""
        width = self.widths[at]
        self.widths.append(width)
        module = self.part(nn.Linear(width, width, bias=False))
        return lambda v: v[at] + module(torch.tanh(module(v[at])))

    def norm(self, at: int) -> Step:
        """RMSNorm or LayerNorm, with or without a gain, or written out."""
        width = self.widths[at]
        self.widths.append(width)
        kind = self.random.choice(["rms", "rms", "layer", "bare", "offset", "unit"])
        if kind in ("rms", "layer", "bare"):
            affine = kind != "bare"
            module = nn.LayerNorm(width, 1e-3) if kind == "layer" else nn.RMSNorm(width, 1e-3, affine)
            self.part(module)
            return lambda v: module(v[at])
        g = self.vector(width)
        if kind == "unit":
            return lambda v: v[at] / (v[at].square().sum(-1, keepdim=True) + 0.1).sqrt()
        return lambda v: v[at] * torch.rsqrt(v[at].pow(2).mean(-1, keepdim=True) + 1e-3) * (1.0 + self.vectors[g])

    def head_norm(self, at: int) -> Step:
        """A norm of each half or quarter of the columns."""
        width = self.widths[at]
        self.widths.append(width)
        heads = self.random.choice([h for h in (1, 2, 4) if width % h == 0])
        module = self.part(nn.RMSNorm(width // heads, 1e-3))
        return lambda v: module(v[at].unflatten(-1, (heads, -1))).flatten(-2)

    def curve(self, at: int) -> Step:
        """An elementwise map."""
        self.widths.append(self.widths[at])
        f = self.random.choice(CURVES)
        return lambda v: f(v[at])

    def residual(self, at: int) -> Step:
        """Two values combined elementwise."""
        other = self.partner(self.widths[at])
        self.widths.append(self.widths[at])
        combine = self.random.choice(COMBINATIONS)
        return lambda v: combine(v[at], v[at if other is None else other])

    def scaled(self, at: int) -> Step:
        """A value and a vector over columns, over rows, or a number."""
        width = self.widths[at]
        self.widths.append(width)
        kind = self.random.choice(["column", "bias", "row", "scalar", "number"])
        if kind == "row":
            return lambda v: v[at] * torch.sigmoid(v[at].mean(-1, keepdim=True))
        if kind == "number":
            c = self.random.choice([0.5, -2.0, 3])
            return lambda v: c - v[at] * c
        g = self.vector(width) if kind != "scalar" else self.vector(1)
        return lambda v: v[at] + self.vectors[g] if kind == "bias" else self.vectors[g] * v[at]

    def gated(self, at: int) -> Step:
        """The two halves, or the even and the odd columns, combined."""
        width = self.widths[at]
        if width % 2:
            return self.curve(at)
        self.widths.append(width // 2)
        combine = self.random.choice([torch.mul, lambda a, b: functional.gelu(a) * b, torch.maximum])
        if self.random.random() < 0.5:
            return lambda v: combine(*v[at].chunk(2, -1))
        return lambda v: combine(v[at][..., ::2], v[at][..., 1::2])

    def rotated(self, at: int) -> Step:
        """Pairs of columns turned by angles, which are a vector here."""
        width = self.widths[at]
        if width % 2:
            return self.curve(at)
        self.widths.append(width)
        a = self.vector(width // 2)

        def halves(v: Sequence[Tensor]) -> Tensor:
            x, y = v[at].chunk(2, -1)
            c, s = self.vectors[a].cos(), self.vectors[a].sin()
            return torch.cat([x * c - y * s, x * s + y * c], -1)

        def adjacent(v: Sequence[Tensor]) -> Tensor:
            x, y = v[at][..., ::2], v[at][..., 1::2]
            c, s = self.vectors[a].cos(), self.vectors[a].sin()
            return torch.stack([x * c - y * s, x * s + y * c], -1).flatten(-2)

        return self.random.choice([halves, adjacent])

    def joined(self, at: int) -> Step:
        """Columns of two values side by side, or cut and put together in another order."""
        width, other = self.widths[at], self.random.randrange(len(self.widths))
        if self.random.random() < 0.5:
            self.widths.append(width + self.widths[other])
            return lambda v: torch.cat([v[at], v[other]], -1)
        self.widths.append(width)
        cut = self.random.randrange(1, width)
        return lambda v: torch.cat(v[at].split([cut, width - cut], -1)[::-1], -1)

    def statistic(self, at: int) -> Step:
        """A value scaled by what another one's rows sum or reach up to."""
        other = self.random.randrange(len(self.widths))
        self.widths.append(self.widths[at])
        f = self.random.choice([lambda x: x.sum(-1, True), lambda x: x.amax(-1, True), lambda x: x.logsumexp(-1, True)])
        return lambda v: v[at] * torch.tanh(f(v[other]))

    def opaque(self, at: int) -> Step:
        """What stays with PyTorch, in the middle."""
        width = self.widths[at]
        self.widths.append(width)
        f = self.random.choice([lambda x: torch.softmax(x, -1), lambda x: x.flip(-1), lambda x: x.cumsum(-1) * 0.3])
        if self.rank == 3 and self.random.random() < 0.5:
            return lambda v: functional.scaled_dot_product_attention(v[at], v[at], v[at], is_causal=True)
        return lambda v: f(v[at])

    def reshaped(self, at: int) -> Step:
        """A detour over another shape, or over a transpose."""
        self.widths.append(self.widths[at])
        g = self.vector(self.widths[at])
        if self.random.random() < 0.5:
            return lambda v: (v[at].flatten(0, -2) * self.vectors[g]).view_as(v[at])
        return lambda v: (v[at].mT * self.vectors[g][:, None]).mT

    def written(self, at: int) -> Step:
        """In-place arithmetic on a value of its own, or a value that no gradient passes."""
        self.widths.append(self.widths[at])
        if self.random.random() < 0.5:
            return lambda v: v[at].clone().mul_(0.5).add_(v[at])
        return lambda v: v[at] + torch.sigmoid(v[at]).detach()


CURVES = (
    torch.relu,
    functional.silu,
    functional.gelu,
    lambda x: functional.gelu(x, approximate="tanh"),
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    torch.abs,
    lambda x: torch.exp(-x * x),
    lambda x: x * x,
    lambda x: torch.where(x > 0.3, x, 0.1 * x),
    lambda x: 1.0 / (1.0 + x.abs()),
    lambda x: torch.log1p(x * x),
    lambda x: x.clamp(-1.0, 2.0),
    functional.softplus,
)
COMBINATIONS = (
    torch.add,
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, 2.0 * b),
    lambda a, b: torch.add(a, b, alpha=0.5),
    lambda a, b: torch.lerp(a, b, 0.25),
)
KINDS = (
    *(RandomModule.linear,) * 6,
    *(RandomModule.siblings, RandomModule.shared),
    *(RandomModule.norm,) * 4,
    *(RandomModule.residual,) * 3,
    *(RandomModule.curve,) * 3,
    *(RandomModule.scaled,) * 2,
    RandomModule.head_norm,
    RandomModule.gated,
    RandomModule.rotated,
    RandomModule.joined,
    RandomModule.statistic,
    RandomModule.opaque,
    RandomModule.reshaped,
    RandomModule.written,
)


def holds(seed: int) -> None:
    """The random module of a seed, in float64: outputs and gradients are PyTorch's."""
    random = Random(seed)
    shape = random.choice([(5,), (1,), (2, 3), (1, 4), (3, 1)])
    module = RandomModule(random, len(shape) + 1)
    fresh(module, seed)
    module.double()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, module.widths[0], generator=generator).double()
    x.requires_grad_(random.random() < 0.8)
    reference = run(module, [x], module, seed)
    with recording() as found, unwritten_memory_is_nan():
        ours = run(compiled(module), [x], module, seed)
    assert not [c for g in found for c in g.capture.opaque if c.op.split(".")[1:2] in GEMMS]
    assert ours.differentiable == reference.differentiable
    for i, (a, b) in enumerate(zip(ours.outputs, reference.outputs, strict=True)):
        assert a.shape == b.shape, f"output {i}"
        assert relative_error(a, b) < BOUND, f"output {i}"
    for name, b in reference.gradients.items():
        a = ours.gradients[name]
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            size = max(b.norm().item(), 1e-6)  # a gradient that cancels to nothing has no relative error
            assert (a - b).norm().item() < BOUND * size, name


@given(st.integers(0, 2**31))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_random_modules(seed):
    """C34: any DAG of linears, norms, elementwise maps, pairs and residuals, with inputs of two and three dimensions:
    it compiles, forward and gradients equal float64, nothing depends on a model's name."""
    holds(seed)


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter beside it, as LoRA trains one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.RMSNorm(24, 1e-5), nn.Linear(24, 32)
        self.down, self.up = nn.Linear(24, 4, bias=False), nn.Linear(4, 32, bias=False)
        for p in (*self.norm.parameters(), *self.base.parameters()):
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.base(h) + 2.0 * self.up(self.down(h))


class Classifier(nn.Module):
    """A perceptron with a pooled head: a mean over tokens, then a loss over few classes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(24, 40), nn.Linear(40, 24), nn.Linear(24, 10)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(functional.gelu(self.a(self.norm(x))))
        return functional.log_softmax(self.head(x.mean(1)), -1)


class Experts(nn.Module):
    """Two experts weighed by a router: a softmax over their scores stays with PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(24, 2, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 24)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Convolved(nn.Module):
    """A gated block with a short convolution over tokens between its linears."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(24, 64, bias=False), nn.Linear(32, 24, bias=False)
        self.conv = nn.Conv1d(32, 32, 3, padding=2, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        a, gate = self.into(x).chunk(2, -1)
        a = self.conv(a.mT)[..., : x.shape[1]].mT
        return x + self.out(functional.silu(a) * gate)


@pytest.mark.parametrize("make", [Adapted, Classifier, Experts, Convolved])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_modules_of_other_kinds(make, dtype):
    """C34: a low-rank adapter on a frozen linear, a classifier, a mixture of experts, a convolution between linears."""
    agree(make().to(dtype), lambda g: [torch.randn(8, 12, 24, generator=g).to(dtype).requires_grad_()])
