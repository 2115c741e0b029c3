"""Rebuilds a traced ATen graph with every mode made explicit: casts for autocast, ``detach`` for no_grad."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from codetta.capture.aten_trace import MODE, RESULT, Mode, Policy
from codetta.capture.autocast import apply_explicit, autocast_as, explicit_form
from codetta.capture.inplace import WAS_IN_PLACE, mutated_arguments
from codetta.capture.peel import is_empty_part, is_full_slice, is_identity, plain_cast
from codetta.errors import CaptureError

aten = torch.ops.aten

_KEPT_META = ("stack_trace", "nn_module_stack", "custom")


@dataclass(slots=True)
class Rebuild:
    """A graph under construction: ``live`` holds the fake value of each new node, with its autograd history."""

    root: GraphModule
    fake_mode: FakeTensorMode
    escaping: frozenset[int]
    pure: bool
    grad: bool
    graph: Graph = field(default_factory=Graph)
    live: dict[Node, Any] = field(default_factory=dict)
    casts: dict[tuple[Node, torch.dtype], Node] = field(default_factory=dict)
    detached: dict[Node, Node] = field(default_factory=dict)


def rebuild(state: Rebuild, traced: GraphModule, inputs: Sequence[Any], names: Sequence[str]) -> GraphModule:
    """The pure graph of ``traced``: no mode, no identity; each node has its fake value as ``meta["val"]``."""
    new: dict[Node, Any] = {}
    placeholders = iter(zip(inputs, names, strict=True))
    with state.fake_mode, torch.set_grad_enabled(state.grad), autocast_as(()):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                value, name = next(placeholders)
                new[node] = record(state, state.graph.placeholder(name), value)
            elif node.op == "output":
                state.graph.output(map_arg(node.args[0], new.__getitem__))
            else:
                new[node] = rebuild_node(state, node, new)
    return GraphModule(state.root, state.graph)


def record(state: Rebuild, node: Node, value: Any) -> Node:
    """Attach ``value`` to ``node``; ``meta`` gets it without autograd history, so that graphs can be copied."""
    state.live[node] = value
    node.meta["val"] = pytree.tree_map_only(Tensor, _without_history, value)
    return node


def rebuild_node(state: Rebuild, node: Node, new: dict[Node, Any]) -> Any:
    """The new node (or the plain number) that stands for ``node``."""
    if node.op == "get_attr":
        return _attribute(state, node)
    if node.op != "call_function":
        raise CaptureError(f"unexpected {node.op} {node.target} in an ATen graph")
    mode: Mode = node.meta.get(MODE) or Mode(grad=state.grad)
    args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
    if not mode.grad and state.grad:
        _refuse_hidden_mutation(state, node, args)
        args, kwargs = map_arg((args, kwargs), lambda n: _detach(state, n, node))
    elif mode.grad and not state.grad:
        raise CaptureError("gradients are switched on inside a graph that is called with gradients off")
    if mode.autocast and isinstance(node.target, OpOverload) and _takes_floats(state, args, kwargs):
        form = explicit_form(node.target, *map_arg((args, kwargs), state.live.__getitem__), mode.autocast)
        if form is None:
            return _decomposed(state, node, args, kwargs, mode)
        args, kwargs = apply_explicit(args, kwargs, form, lambda x, dtype: _cast(state, x, dtype, node, mode))
    return _emit(state, node, args, kwargs, mode)


def _emit(state: Rebuild, like: Node, args: Any, kwargs: Any, mode: Mode) -> Any:
    """Run one operator on fakes, then add its node, unless it changes nothing."""
    if like.target in (aten.cat.default, aten.concat.default):
        args = _without_empty_parts(state, args, like)
    live_args, live_kwargs = map_arg((args, kwargs), state.live.__getitem__)
    with _policy_recorder(mode) as recorder:
        result = _call(like, live_args, live_kwargs)
    if isinstance(result, (int, float, bool)):
        return result  # every symbol in it was specialised
    source = _peeled(state, like, args, result)
    if source is not None:
        return source
    target = like.target
    if plain_cast(like, live_args[0] if live_args else None, result):
        target, args, kwargs = aten.to.dtype, (args[0], result.dtype), {}
    node = state.graph.create_node("call_function", target, args, kwargs, name=like.name)
    node.meta.update({key: like.meta[key] for key in _KEPT_META if key in like.meta})
    if mode.region is not None:
        node.meta["recompute"] = recorder.decision()
        node.meta["ac_graph_id"] = mode.region
    return record(state, node, result)


def _call(like: Node, args: Any, kwargs: Any) -> Any:
    """The fake result of a node; an opaque call has run while tracing, and may not run outside of it."""
    if RESULT in like.meta:
        return like.meta[RESULT]
    with enable_python_dispatcher():  # before torch 2.13 the C++ forms of linear and matmul specialise every size
        return like.target(*args, **kwargs)  # type: ignore[operator]


def _refuse_hidden_mutation(state: Rebuild, node: Node, args: Any) -> None:
    """Under no_grad, writing into a tensor that has a gradient bypasses autograd, which no pure graph can say."""
    if not mutated_arguments(node) and WAS_IN_PLACE not in node.meta:
        return
    value = state.live.get(args[0])
    if isinstance(value, Tensor) and value.requires_grad:
        raise CaptureError(f"{node.target} writes under no_grad into a tensor that requires a gradient")


def _peeled(state: Rebuild, like: Node, args: Any, result: Any) -> Node | None:
    """The node that ``like`` only repeats, or ``None``."""
    source = args[0] if args else None
    if isinstance(source, (list, tuple)) and len(source) == 1:
        source = source[0]
    if not isinstance(source, Node) or not isinstance(state.live[source], Tensor):
        return None
    if source.op == "placeholder" and any(user.op == "output" for user in like.users):
        return None  # returning an input itself is not the same as returning its view
    copies = state.pure and isinstance(result, Tensor) and _storage(like.meta.get("val")) not in state.escaping
    value = state.live[source]
    if is_identity(like, value, result, copies=copies) or is_full_slice(like):
        return source
    return None


def _without_empty_parts(state: Rebuild, args: Any, like: Node) -> Any:
    """The arguments of a concatenation, less the parts of size zero."""
    whole = like.meta.get("val")
    parts = [p for p in args[0] if not (isinstance(whole, Tensor) and is_empty_part(state.live[p], whole))]
    return (parts, *args[1:]) if parts else args


def _detach(state: Rebuild, node: Node, like: Node) -> Node:
    """``node`` cut off from its gradient, if it has one."""
    value = state.live[node]
    if not (isinstance(value, Tensor) and value.requires_grad):
        return node
    if node not in state.detached:
        cut = state.graph.call_function(aten.detach.default, (node,))
        cut.meta.update({key: like.meta[key] for key in _KEPT_META if key in like.meta})
        state.detached[node] = record(state, cut, value.detach())
    return state.detached[node]


def _cast(state: Rebuild, node: Node, dtype: torch.dtype, like: Node, mode: Mode) -> Node:
    """``node`` cast to ``dtype``.

    Casts of weights are shared, as autocast's cache shares them. Those of activations are not: through a shared cast
    their gradients would add up in the narrow dtype, and autocast adds them up in the wide one.
    """
    key = (node, dtype)
    shared = node.op == "placeholder" or not state.live[node].requires_grad
    if shared and state.pure and key in state.casts:
        return state.casts[key]
    cast = state.graph.call_function(aten.to.dtype, (node, dtype))
    cast.meta.update({name: like.meta[name] for name in _KEPT_META if name in like.meta})
    if mode.region is not None:
        cast.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        cast.meta["ac_graph_id"] = mode.region
    state.casts[key] = record(state, cast, state.live[node].to(dtype))
    return state.casts[key]


def _decomposed(state: Rebuild, node: Node, args: Any, kwargs: Any, mode: Mode) -> Any:
    """``node`` as the smaller operators it is composed of, with the casts that autocast makes between them."""
    target: Any = node.target
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Node)]

    def body(*values: Any) -> Any:
        given = iter(values)
        filled = [next(given) if isinstance(x, Node) else x for x in leaves]
        inner_args, inner_kwargs = pytree.tree_unflatten(filled, spec)
        return target(*inner_args, **inner_kwargs)

    with torch.set_grad_enabled(mode.grad), autocast_as(mode.autocast):
        inner = make_fx(body, tracing_mode="real")(*(state.live[x] for x in tensors))
    new: dict[Node, Any] = {}
    given = iter(tensors)
    for part in inner.graph.nodes:
        if part.op == "placeholder":
            new[part] = next(given)
        elif part.op == "output":
            return map_arg(part.args[0], new.__getitem__)
        else:
            part.meta.update({key: node.meta[key] for key in _KEPT_META if key in node.meta})
            part.meta[MODE] = replace(mode, autocast=())
            new[part] = rebuild_node(state, part, new)
    raise CaptureError(f"{target} decomposes into a graph without an output")


def _attribute(state: Rebuild, node: Node) -> Node:
    """A constant tensor or a sub-graph of the traced module."""
    target = str(node.target)
    value: Any = state.root
    for part in target.split("."):
        value = getattr(value, part)
    copy = state.graph.get_attr(target)
    if isinstance(value, Tensor):
        return record(state, copy, state.fake_mode.from_tensor(value, static_shapes=True))
    state.live[copy] = value
    return copy


class _PolicyRecorder(TorchDispatchMode):
    """Asks a user's selective-checkpointing policy about every low-level operator that a node runs."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.decisions: list[CheckpointPolicy | bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and keep the policy's answer for it."""
        kwargs = kwargs or {}
        self.decisions.append(self.policy(SelectiveCheckpointContext(is_recompute=False), func, *args, **kwargs))
        return func(*args, **kwargs)

    def decision(self) -> CheckpointPolicy:
        """Save the node's result if the policy saves anything in it."""
        answers = [CheckpointPolicy.MUST_SAVE if a is True else a for a in self.decisions]
        order = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
        return next((p for p in order if p in answers), CheckpointPolicy.PREFER_RECOMPUTE)


class _NoPolicy:
    """Stands in where there is no policy: plain checkpointing recomputes everything."""

    def __enter__(self) -> "_NoPolicy":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def decision(self) -> CheckpointPolicy:
        """Recompute, unless the compiler finds saving cheaper."""
        return CheckpointPolicy.PREFER_RECOMPUTE


def _policy_recorder(mode: Mode) -> Any:
    return _NoPolicy() if mode.policy is None else _PolicyRecorder(mode.policy)


def _without_history(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.requires_grad else value


def _takes_floats(state: Rebuild, args: Any, kwargs: Any) -> bool:
    values = [state.live[x] for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Node)]
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


def _storage(value: Any) -> int | None:
    """What tells two tensors that share memory from two that do not."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
