"""ATen graphs cut into segments and run with each segment evaluated node by node: what capture says, no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from codetta.backends.reference.evaluate import evaluate
from codetta.capture.segment import Capture, cut
from codetta.capture.splice import splice
from codetta.ir.graph import Graph
from codetta.runtime import registry
from codetta.runtime.compile import Options
from codetta.runtime.library import LIBRARY

Run = Callable[..., Any]


@dataclass(frozen=True)
class Cut:
    """A graph, its segments, the graph with the segments put back, and the tensor graph behind each key."""

    gm: GraphModule
    capture: Capture
    spliced: GraphModule
    graphs: dict[str, Graph]

    def run(self, *inputs: Any) -> Any:
        """The spliced graph's outputs."""
        return _Evaluated(self).run(*inputs)

    def graph(self, index: int = 0) -> Graph:
        """The tensor graph of a segment."""
        return self.capture.segments[index].graph

    def gemms(self) -> list[int]:
        """The number of GEMMs of each segment."""
        return [len(s.graph.contractions) for s in self.capture.segments]

    def opaque(self) -> list[str]:
        """The operators that stay with PyTorch, by their ATen name."""
        return [o.op.removeprefix("aten.").split(".")[0] for o in self.capture.opaque]


def cut_graph(gm: GraphModule) -> Cut:
    """A normalised graph cut and spliced."""
    capture = cut(gm)
    keys: dict[Graph, str] = {}

    def register(graph: Graph, requires_grad: tuple[bool, ...]) -> str:
        return keys.setdefault(graph, f"{LIBRARY.ns}{len(keys)}")

    spliced = splice(gm, capture, register)
    return Cut(gm, capture, spliced, {key: graph for graph, key in keys.items()})


def cut_function(fn: Callable[..., Any], *inputs: Any) -> Cut:
    """A function traced at these inputs, cut and spliced."""
    return cut_graph(traced(fn, *inputs))


def traced(fn: Callable[..., Any], *inputs: Any) -> GraphModule:
    """A function as a graph of ATen operators, each fake value saying whether it has a gradient."""
    gm = make_fx(fn, pre_dispatch=True, tracing_mode="fake")(*inputs)
    given = iter(inputs)
    for n in gm.graph.nodes:
        value = n.meta.get("val")
        if n.op == "placeholder":
            wanted = next(given).requires_grad
        else:
            wanted = n.target is not torch.ops.aten.detach.default and any(
                _differentiable(a) for a in n.all_input_nodes
            )
        if isinstance(value, Tensor) and value.is_floating_point():
            n.meta["val"] = value.detach().requires_grad_(wanted)
    return gm


def _differentiable(n: fx.Node) -> bool:
    return any(t.requires_grad for t in tensors(n.meta.get("val")))


def compiled(gm: GraphModule) -> GraphModule:
    """A graph whose segments are compiled, and run as the plans that they were compiled to."""
    return splice(gm, cut(gm), lambda graph, requires_grad: registry.register(graph, requires_grad, Options()))


class _Evaluated(fx.Interpreter):
    def __init__(self, cut: Cut) -> None:
        super().__init__(cut.spliced)
        self.graphs = cut.graphs

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not torch.ops.codetta.segment.default:
            return super().call_function(target, args, kwargs)
        graph = self.graphs[args[1]]
        return evaluate(graph.roots, dict(zip(graph.inputs, args[0], strict=True)))


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a nested result."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor | None]:
    """The gradient of each differentiable input, from uneven cotangents."""
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    reached = [t for t in outputs if t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in reached]
    if not wanted or not reached:
        return [None] * len(wanted)
    return list(torch.autograd.grad(reached, wanted, cotangents, allow_unused=True))


def assert_same(cut: Cut, *inputs: Any, rtol: float = 1e-11, atol: float = 1e-11) -> None:
    """The spliced graph's outputs and gradients are those of the graph that it came from."""
    assert_equal(cut.run, cut.gm, inputs, rtol, atol)


def assert_equal(run: Run, oracle: Run, inputs: Sequence[Any], rtol: float, atol: float) -> None:
    """Two functions have the same outputs and gradients."""
    expected, found = tensors(oracle(*inputs)), tensors(run(*inputs))
    assert len(expected) == len(found)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
