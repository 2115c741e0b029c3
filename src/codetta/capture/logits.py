"""The logits of a graph that returns a loss: which output they are, and a placeholder for those who never read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from codetta.errors import CodettaError

aten = torch.ops.aten
THROUGH = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.type_as.default, aten._to_copy.default),
    *(aten.slice.Tensor, aten.contiguous.default, aten.alias.default, aten.unsqueeze.default, aten.squeeze.dim),
}


def logits_outputs(gm: GraphModule) -> list[int]:
    """The positions of outputs that a cross-entropy of the same graph reads."""
    read: set[fx.Node] = set()
    for n in gm.graph.nodes:
        if n.target is aten.cross_entropy_loss.default:
            a = n.args[0]
            while isinstance(a, fx.Node):
                read.add(a)
                a = a.args[0] if a.target in THROUGH else None
    return [i for i, n in enumerate(outputs_of(gm)) if isinstance(n, fx.Node) and _source(n) in read]


def _source(n: fx.Node) -> fx.Node:
    while n.target in THROUGH and isinstance(n.args[0], fx.Node):
        n = n.args[0]
    return n


def outputs_of(gm: GraphModule) -> list[Any]:
    """What the graph returns, one entry each."""
    found = gm.graph.output_node().args[0]
    return list(found) if isinstance(found, (tuple, list)) else [found]


def without_outputs(gm: GraphModule, positions: list[int]) -> list[Tensor]:
    """Have the graph return None at these positions, and return their fake values."""
    kept = outputs_of(gm)
    fakes = [kept[i].meta["val"] for i in positions]
    node = gm.graph.output_node()
    node.args = (tuple(None if i in positions else n for i, n in enumerate(kept)),)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return fakes


class NoLogits(Tensor):
    """Stands where the logits would be; any use raises and says why."""

    @staticmethod
    def like(fake: Tensor) -> NoLogits:
        """A placeholder with the dtype of the logits that were not returned."""
        return torch.empty((), dtype=fake.dtype, device="meta").as_subclass(NoLogits)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse."""
        raise CodettaError(
            "the logits were not computed: this model was compiled with options={'logits': 'never'}",
            hint="compile with options={'logits': 'auto'} to read them",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # Tensor's is untyped
        """The one thing that does not raise: debuggers print."""
        return "<no logits: compiled with options={'logits': 'never'}>"
