"""Embeddings whose gradient is added in place (``nn.embedding``): to zeros, or to that of a head of ours which has the
same weight, and takes it from the embedding's hand."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from codetta.capture.aten import arguments
from codetta.capture.cacheable import cacheable
from codetta.capture.loss_head import CASTS, head_loss
from codetta.capture.normalise import is_parameter
from codetta.nn.embedding import embedding_and_weight

EMBEDDING = torch.ops.aten.embedding.default
# What makes its weight's gradient anew each time, so that it may be written over.
OURS = {head_loss, torch.ops.codetta.segment.default}


def take_embeddings(spliced: GraphModule) -> int:
    """Replace embeddings of trained parameters that nobody reads besides, or segments and heads of ours alone; returns
    how many."""
    order = {n: i for i, n in enumerate(spliced.graph.nodes)}
    found = [n for n in spliced.graph.find_nodes(op="call_function", target=EMBEDDING) if _suits(n, order)]
    for node in found:
        _take(spliced.graph, node)
    if found:
        spliced.graph.lint()
        spliced.recompile()
    return len(found)


def _suits(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    weight, _, _, scaled, sparse = _given(node)
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or not is_parameter(weight):
        return False
    plain = not scaled and not sparse and weight.meta["val"].requires_grad
    return plain and all(_is_ours(u) and order[u] > order[node] for u in weight.users if u is not node)


def _given(node: fx.Node) -> tuple[Any, ...]:
    """Weight, ids, the padding's id, and whether the gradient is scaled or sparse."""
    return tuple(value for _, value, _ in arguments(node, EMBEDDING))


def _is_ours(user: fx.Node) -> bool:
    """Whether a reader of a weight, or all that read its cast, are calls of ours."""
    value = user.meta.get("val")
    if user.target in CASTS and value is not None and value.dtype != user.args[0].meta["val"].dtype:  # type: ignore[union-attr]
        return all(map(_is_ours, user.users))
    return user.target in OURS


def _take(graph: fx.Graph, node: fx.Node) -> None:
    weight, ids, padding, *_ = _given(node)
    with graph.inserting_before(node):
        call = graph.call_function(embedding_and_weight, (weight, ids, padding))
        call.meta = cacheable()
        rows, again = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
    values = node.meta["val"], weight.meta["val"]
    call.meta["val"], rows.meta["val"], again.meta["val"] = values, *values
    weight.replace_all_uses_with(again, lambda user: user not in (node, call))
    node.replace_all_uses_with(rows)
    graph.erase_node(node)
