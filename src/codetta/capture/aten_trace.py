"""Turns the graph that Dynamo made into ATen operators, noting for each in which mode it ran."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._higher_order_ops.wrap import TagActivationCheckpoint, tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.traceback import preserve_node_meta

from codetta.errors import CaptureError

MODE = "codetta_mode"
RESULT = "codetta_result"
Policy = Callable[..., Any]

_CHECKPOINT_IDS = count()


@dataclass(frozen=True, slots=True)
class Mode:
    """The state an operator was called in: gradients, autocast (dtype per device type), checkpointed region."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    region: int | None = None
    policy: Policy | None = None


def trace_aten(gm: GraphModule, inputs: Sequence[object], device_types: Sequence[str]) -> GraphModule:
    """The graph of ``gm`` in whole ATen operators, each with its ``Mode`` in ``meta``.

    Switches of autocast and of gradients are carried out while tracing and leave no node behind. ``inputs`` are fake.
    """
    interpreter = _ToAten(gm, tuple(device_types), Mode(grad=torch.is_grad_enabled()))
    with _modes_restored(interpreter), preserve_node_meta():
        return make_fx(interpreter.run, pre_dispatch=True, tracing_mode="real")(*inputs)


class _ToAten(Interpreter):
    """Runs Dynamo's graph under a tracer; consumes what must not survive into the ATen graph."""

    def __init__(self, gm: GraphModule, device_types: tuple[str, ...], base: Mode) -> None:
        super().__init__(gm)
        self.device_types = device_types
        self.base = base
        self.autocasts: list[Any] = []
        self.grad_modes: list[bool] = []

    def run_node(self, n: Node) -> Any:
        """Run one node, then stamp every ATen node that it made with the mode it was made in."""
        graph = _tracer().graph
        last = next(iter(reversed(graph.nodes)), None)
        result = super().run_node(n)
        mode = self._mode()
        for made in reversed(graph.nodes):
            if made is last or MODE in made.meta:
                break
            made.meta[MODE] = mode
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out switches of mode, inline checkpointed bodies, keep other higher-order operators whole."""
        if target in _SWITCHES:
            with torch._C.DisableTorchFunction():
                return _SWITCHES[target](self, *args)
        if target is tag_activation_checkpoint or _is_nested_region(target):
            return self._inline(target, args, kwargs)
        if isinstance(target, HigherOrderOperator):
            return self._keep_whole(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Turn the number read from a wrapped Python float back into a constant, which guards its value."""
        result = super().call_method(target, args, kwargs)
        if target == "item" and isinstance(result, torch.SymFloat) and result.node.has_hint():
            return float(result)
        return result

    def _mode(self) -> Mode:
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind)) for kind in self.device_types if torch.is_autocast_enabled(kind)
        )
        return replace(self.base, grad=torch.is_grad_enabled(), autocast=autocast)

    def _inline(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a region's body in place; a checkpointed one marks its nodes with a region of their own."""
        body, *rest = args
        base = self.base
        if target is tag_activation_checkpoint:
            _, kwargs = TagActivationCheckpoint.divide_kwargs(kwargs)
            base = replace(base, region=next(_CHECKPOINT_IDS), policy=_selective_policy(body))
        else:
            rest = rest[1:]  # invoke_subgraph's second argument is the name of the region
        if kwargs:
            raise CaptureError(f"{target} was called with keyword arguments {sorted(kwargs)}; none are expected")
        inner = _ToAten(body, self.device_types, base)
        with _modes_restored(inner):
            return inner.run(*rest)

    def _keep_whole(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Emit one opaque call. Tracing into it could lose a hand-written backward."""
        if self._mode().autocast:
            raise CaptureError(f"{target} is called under autocast, which cannot be made explicit inside it")
        tracer = _tracer()
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            result = target(*args, **kwargs)
        proxies = pytree.tree_map(partial(_proxy_of, tracer), (args, kwargs))
        call = tracer.create_proxy("call_function", target, *proxies)
        call.node.meta[RESULT] = result
        return track_tensor_tree(result, call, constant=None, tracer=tracer)


def _tracer() -> Any:
    """The tracer that is recording now."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(mode.tracer, PythonKeyTracer):
        raise CaptureError("no tracer is recording")
    return mode.tracer


def _proxy_of(tracer: Any, value: Any) -> Any:
    """What stands for ``value`` in the traced graph; a sub-graph becomes an attribute of its root."""
    if isinstance(value, GraphModule):
        names = (f"body_{i}" for i in count())
        name = next(n for n in names if not hasattr(tracer.root, n))
        setattr(tracer.root, name, value)
        return tracer.create_proxy("get_attr", name, (), {})
    return tracer.unwrap_proxy(value)


def _is_nested_region(target: Any) -> bool:
    """Whether ``target`` only groups its body (``torch.compiler.nested_compile_region``)."""
    return target is torch.ops.higher_order.invoke_subgraph


def _selective_policy(body: GraphModule) -> Policy | None:
    """The user's selective-checkpointing policy for ``body``, if there is one."""
    context_fn = body.meta.get("_checkpoint_context_fn")
    if context_fn is None:
        return None
    forward, _ = context_fn()
    policy: Policy | None = getattr(forward, "policy_fn", None)
    if policy is None:
        raise CaptureError(
            "a checkpoint's context_fn is not one of create_selective_checkpoint_contexts",
            hint="use create_selective_checkpoint_contexts, or leave context_fn out",
        )
    return policy


def _push_autocast(interpreter: _ToAten, *args: Any) -> Any:
    mode = _enter_autocast(*args)
    interpreter.autocasts.append(mode)
    return mode


def _pop_autocast(interpreter: _ToAten, mode: Any) -> None:
    interpreter.autocasts.remove(mode)
    _exit_autocast(mode)


def _set_grad(_: _ToAten, enabled: bool) -> None:
    torch._C._set_grad_enabled(enabled)


def _push_inference(interpreter: _ToAten, enabled: bool) -> None:
    """Inference mode as gradients off: fake tensors made inside must stay usable outside."""
    interpreter.grad_modes.append(torch.is_grad_enabled())
    torch._C._set_grad_enabled(not enabled and torch.is_grad_enabled())


def _pop_inference(interpreter: _ToAten, _: Any) -> None:
    torch._C._set_grad_enabled(interpreter.grad_modes.pop())


def _nothing(*_: Any) -> None:
    """A call that means nothing to the values, such as a log entry."""


_SWITCHES: dict[Any, Callable[..., Any]] = {
    _enter_autocast: _push_autocast,
    _exit_autocast: _pop_autocast,
    torch._C._set_grad_enabled: _set_grad,
    _enter_inference_mode: _push_inference,
    _exit_inference_mode: _pop_inference,
    torch._C._log_api_usage_once: _nothing,
}


@contextmanager
def _modes_restored(interpreter: _ToAten) -> Iterator[None]:
    """Leaves autocast and gradient mode as they were, also after a failed trace."""
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            while interpreter.autocasts:
                _exit_autocast(interpreter.autocasts.pop())
            torch._C._set_grad_enabled(grad)
