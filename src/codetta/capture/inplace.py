"""Operators that write into their arguments: made pure where nobody else sees the memory, and pinned elsewhere."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten

PINNED = "codetta_pinned"
WAS_IN_PLACE = "codetta_was_in_place"


def mutated_arguments(node: Node) -> list[Node]:
    """The nodes whose memory ``node`` writes to."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
        map_arg(given, written.append)
    return written


def functionalise(traced: GraphModule) -> None:
    """Replace in-place operators by pure ones wherever no other view of the memory is read afterwards.

    The tracer makes later uses of the tensor itself read the in-place node, so only views made before it, inputs and
    constants stand in the way; those keep their in-place form.
    """
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    for node in list(traced.graph.nodes):
        written = mutated_arguments(node)
        if not written:
            continue
        pure = _pure_form(node)
        if pure is not None and len(written) == 1 and _is_private(traced.graph, node, order):
            _replace(traced.graph, node, pure)
    traced.graph.lint()


def mark_pinned(gm: GraphModule) -> None:
    """Mark every node that reads, writes or aliases memory which the graph mutates."""
    mutated = {_storage(n) for node in gm.graph.nodes for n in mutated_arguments(node)}
    mutated.discard(None)
    if not mutated:
        return
    for node in gm.graph.nodes:
        touched = [node, *node.all_input_nodes]
        if node.op == "call_function" and any(_storage(n) in mutated for n in touched):
            node.meta[PINNED] = True


def _pure_form(node: Node) -> OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``: same arguments, new result."""
    target: Any = node.target
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or name.startswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    pure: OpOverload | None = getattr(packet, target._overloadname, None)
    if pure is None or pure._schema.is_mutable:
        return None
    names = [[a.name for a in op._schema.arguments] for op in (target, pure)]
    return pure if names[0] == names[1] else None


def _is_private(graph: Graph, node: Node, order: dict[Node, int]) -> bool:
    """Whether nothing but ``node`` itself gives access to the memory it writes, from there on."""
    storage = _storage(node)
    for other in graph.nodes:
        if other is node or _storage(other) != storage:
            continue
        if other.op != "call_function":
            return False
        if order[other] < order[node] and any(order[user] > order[node] for user in other.users):
            return False
    return storage is not None


def _replace(graph: Graph, node: Node, pure: OpOverload) -> None:
    """Turn ``node`` into ``pure``, cast back to the dtype it wrote in; keep it if the layout would change."""
    before: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    with torch.no_grad():
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        after = pure(*args, **kwargs)
    if tuple(after.shape) != tuple(before.shape) or after.stride() != before.stride():
        return
    node.meta[WAS_IN_PLACE] = True
    node.target = pure
    if after.dtype == before.dtype:
        return
    with graph.inserting_after(node):
        cast = graph.call_function(aten.to.dtype, (node, before.dtype))
    cast.meta.update(node.meta)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    node.meta["val"] = after


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
