"""A graph's LM head with its loss as one call of ``linear_cross_entropy``, where nobody reads the logits.

Understood is what models put between the linear layer and the loss: views, casts, a factor, a cap by tanh. The segment
before the head then ends in front of it; what is not understood stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from codetta.nn.linear_cross_entropy import Memory, linear_cross_entropy

aten = torch.ops.aten
REDUCTION = ("none", "mean", "sum")
VIEWS = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.contiguous.default, aten.alias.default),
}
CASTS = {aten.to.dtype, aten.type_as.default, aten._to_copy.default}


@dataclass(frozen=True, slots=True)
class _Chain:
    """From the loss up: the linear layer, the factor and the cap of its logits."""

    linear: fx.Node
    scale: float
    softcap: float | None


def head_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: Any) -> Tensor:
    """The loss of tokens in any shape."""
    found: Tensor = linear_cross_entropy(x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1), bias, **options)
    return found


def without_logits(gm: GraphModule, memory: Memory) -> int:
    """Replace every head whose logits only its loss reads; returns how many."""
    losses = [n for n in gm.graph.nodes if n.target is aten.cross_entropy_loss.default]
    done = sum(_replaced(gm.graph, n, memory) for n in losses)
    if done:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return done


def _replaced(graph: fx.Graph, loss: fx.Node, memory: Memory) -> bool:
    logits, targets, weight, reduction, ignored, smoothing = _arguments(loss)
    classes = targets.meta["val"]
    if (
        weight is not None
        or classes.is_floating_point()
        or loss.meta["val"].dtype not in (torch.float32, torch.float64)
    ):
        return False
    chain = _chain(logits)
    if chain is None or logits.meta["val"].dim() != 2:
        return False
    x, w, *bias = chain.linear.args
    options: dict[str, Any] = {
        "ignore_index": ignored,
        "reduction": REDUCTION[reduction],
        "label_smoothing": smoothing,
        "softcap": chain.softcap,
        "logit_scale": None if chain.scale == 1.0 else chain.scale,
        "memory": memory,
    }
    with graph.inserting_before(loss):
        call = graph.call_function(head_loss, (x, w, bias[0] if bias else None, targets), options)
    call.meta = dict(loss.meta)
    loss.replace_all_uses_with(call)
    graph.erase_node(loss)
    return True


def _arguments(loss: fx.Node) -> tuple[fx.Node, fx.Node, Any, int, int, float]:
    defaults: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given = dict(zip(("self", "target", *defaults), loss.args, strict=False))
    found = {**defaults, **given, **loss.kwargs}
    return tuple(found[n] for n in ("self", "target", *defaults))


def _chain(n: Any) -> _Chain | None:
    n = _above(n)
    softcap = None
    capped = _factor(n)
    if capped is not None and _is(inner := _above(capped[0]), aten.tanh.default):
        below = _factor(_above(inner.args[0]))
        if below is None or abs(below[1] * capped[1] - 1.0) > 1e-6:
            return None
        softcap, n = capped[1], _above(below[0])
    scaled = _factor(n)
    scale = 1.0 if scaled is None else scaled[1]
    n = n if scaled is None else _above(scaled[0])
    return _Chain(n, scale, softcap) if _is(n, aten.linear.default) else None


def _above(n: Any) -> Any:
    """The value behind views and casts to wider floats, as long as nobody else reads it."""
    while isinstance(n, fx.Node) and len(n.users) == 1:
        if n.target not in VIEWS and not (n.target in CASTS and _widens(n)):
            return n
        n = n.args[0]
    return n if isinstance(n, fx.Node) and len(n.users) == 1 else None


def _widens(n: fx.Node) -> bool:
    source, value = n.args[0].meta["val"], n.meta["val"]  # type: ignore[union-attr]
    return bool(
        value.is_floating_point() and source.is_floating_point() and value.element_size() >= source.element_size()
    )


def _factor(n: Any) -> tuple[Any, float] | None:
    """A value times or over a number."""
    if not isinstance(n, fx.Node) or len(n.args) != 2 or not isinstance(n.args[1], int | float):
        return None
    value, number = n.args[0], float(n.args[1])
    if n.target in (aten.mul.Tensor, aten.mul.Scalar):
        return value, number
    return (value, 1.0 / number) if n.target in (aten.div.Tensor, aten.div.Scalar) and number else None


def _is(n: Any, target: Any) -> bool:
    return isinstance(n, fx.Node) and n.target is target
