"""What backward may write over: the values that only it can see, and only where autograd gives the graph up.

The reference backend writes over nothing. Here it is made to: what it is given up holds NaN afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mirror
from codetta.backends.reference.execute import Executable
from codetta.core.types import f64
from codetta.runtime import registry
from codetta.runtime.compile import Options
from graphs import llama_segment, trained
from ways import compiled, fresh

run = Executable.run


class Gated(nn.Module):
    """A norm, SwiGLU and a residual: backward needs what the GEMM stored before the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-5)
        self.up, self.down = nn.Linear(16, 48, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Checkpointed(nn.Module):
    """Two blocks that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many values each run of a plan could write over."""
    counts: list[int] = []

    def scribbling(self: Executable, inputs: dict[str, Tensor], rows: int, names: frozenset[str] = frozenset()):
        found = run(self, inputs, rows, names)
        for name in names:
            inputs[name].fill_(torch.nan)
        counts.append(len(names))
        return found

    monkeypatch.setattr(Executable, "run", scribbling)
    return counts


def gradients(f: object, module: nn.Module, x: Tensor, **options: bool) -> list[Tensor]:
    y = f(x)
    return list(torch.autograd.grad(y.square().sum(), [x, *module.parameters()], **options))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("build", [Gated, Checkpointed])
def test_gradients_where_saved_values_are_written_over(build: type[nn.Module], inner: str, given_up: list[int]):
    """Behind AOTAutograd too, and around recomputation."""
    module = build()
    fresh(module, 0)
    x = torch.randn(6, 16, requires_grad=True)
    found = gradients(compiled(module, inner=inner), module, x)
    torch.testing.assert_close(found, gradients(module, module, x), rtol=1e-3, atol=1e-3)
    assert max(given_up) > 0


@pytest.mark.parametrize("ordinals", [(0, 1), pytest.param((0, 0), marks=pytest.mark.xfail(strict=True))])
def test_calls_that_are_the_same_stay_apart(ordinals: tuple[int, int], given_up: list[int]):
    """AOTAutograd's partitioner makes one call of two equal ones, and their backward passes read the same values."""
    graph = llama_segment(f64)
    wrt = trained(graph)
    key = registry.register(graph, tuple(mirror.name(n) in wrt for n in graph.inputs), Options())
    values = mirror.random_feed(graph, 5, 0)
    inputs = [values[mirror.name(n)].detach().requires_grad_(mirror.name(n) in wrt) for n in graph.inputs]

    def twice(first: int, second: int, *xs: Tensor) -> Tensor:
        a, b = (torch.ops.codetta.segment(xs, key, i)[0] for i in (first, second))
        return (a.sin() + 2.0 * b.square()).sum()

    leaves = [x for x in inputs if x.requires_grad]
    want = torch.autograd.grad(twice(0, 1, *inputs), leaves, allow_unused=True)
    both = aot_function(
        lambda *xs: twice(*ordinals, *xs),
        nop,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    found = torch.autograd.grad(both(*inputs), leaves, allow_unused=True)
    torch.testing.assert_close(found, want)


def test_nothing_is_given_up_while_the_graph_is_kept(given_up: list[int]):
    module = Gated()
    fresh(module, 0)
    x = torch.randn(6, 16, requires_grad=True)
    loss = compiled(module)(x).square().sum()
    leaves = [x, *module.parameters()]
    given_up.clear()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, create_graph=True)
    assert given_up == [0, 0]
    last = torch.autograd.grad(loss, leaves)
    assert given_up[2] > 0
    for a, b, c in zip(first, second, last, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_result_that_the_user_can_see_is_never_given_up(given_up: list[int]):
    """The stream is an output and a value that backward needs; it keeps its bits."""
    module = Checkpointed()
    fresh(module, 0)
    x = torch.randn(6, 16, requires_grad=True)
    y = compiled(lambda x: module.blocks[1](module.blocks[0](x)))(x)
    before = y.detach().clone()
    y.square().sum().backward()
    assert max(given_up) > 0
    assert torch.equal(y.detach(), before)
    assert not any(t.grad.isnan().any() for t in (x, *module.parameters()))
