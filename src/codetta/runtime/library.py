"""The two torch ops behind every segment, ``codetta::segment`` and its backward, with fakes and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from codetta.backends.reference.evaluate import TORCH
from codetta.backends.stacked import STATISTICS
from codetta.core.types import Type
from codetta.errors import UnsupportedError
from codetta.partition.plan import Plan
from codetta.partition.training import cotangent_name
from codetta.runtime.compile import Segment
from codetta.runtime.pack import tell_copies
from codetta.runtime.registry import segment_of

LIBRARY = torch.library.Library("codetta", "DEF")
# xs are the segment's inputs; the results are its outputs, then what only backward needs
LIBRARY.define("segment(Tensor[] xs, str key) -> Tensor[]")
# ts are what autograd held (Segment.kept: inputs, then results), then the cotangents of the outputs that are `given`
LIBRARY.define("segment_backward(Tensor[] ts, str key, bool[] given, SymInt rows) -> Tensor[]")


def _forward(xs: list[Tensor], key: str) -> list[Tensor]:
    segment = segment_of(key)
    inputs = {str(n.attrs[0]): x.contiguous() for n, x in zip(segment.graph.inputs, xs, strict=True)}
    copies = STATISTICS.copies
    with _on_device_of(xs):
        found = segment.run_forward.run(inputs, xs[segment.row_input].shape[0])
    if segment.options.packed and STATISTICS.copies != copies:
        names = list(inputs)
        tell_copies([(tuple(names[i] for i in g), [xs[i] for i in g]) for g in segment.stacks])
    views = dict(segment.forward.outputs)
    return _distinct([found[views[name].buffer] for name in segment.results])


def _on_device_of(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be that of a model."""
    device = next((t.device for t in tensors if t.is_cuda), None)
    other = device is not None and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if other else nullcontext()


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """No two results of an op may share memory; a buffer that is asked for twice is copied."""
    return [t.clone() if any(t is u for u in tensors[:i]) else t for i, t in enumerate(tensors)]


def _empty(like: Tensor, t: Type, rows: Any) -> Tensor:
    sizes = [s if isinstance(s, int) else rows for s in (t.rows, t.cols) if s is not None]
    return like.new_empty(sizes, dtype=TORCH[t.dtype])


def _forward_fake(xs: list[Tensor], key: str) -> list[Tensor]:
    segment = segment_of(key)
    rows = xs[segment.row_input].shape[0]
    return [_empty(xs[0], segment.type_of(name), rows) for name in segment.results]


def _given(segment: Segment, given: Sequence[bool]) -> tuple[str, ...]:
    return tuple(name for (name, _), g in zip(segment.graph.outputs, given, strict=True) if g)


def _buffers(plan: Plan) -> list[str]:
    """The buffers that backward returns: gradients that are rows of one stacked gradient come as that one."""
    return list(dict.fromkeys(view.buffer for _, view in plan.outputs))


def _backward_op(ts: list[Tensor], key: str, given: list[bool], rows: int) -> list[Tensor]:
    segment = segment_of(key)
    names = _given(segment, given)
    plan, runnable = segment.backward(names)
    inputs, results = segment.kept
    held = iter(ts)
    feed = {str(segment.graph.inputs[i].attrs[0]): next(held) for i in inputs}
    kept = {segment.results[i]: next(held) for i in results}
    feed.update({name: kept[output] for name, output in segment.training.saved if output in kept})
    feed.update({cotangent_name(name): next(held) for name in names})
    with _on_device_of(ts):
        found = runnable.run({name: feed[name].contiguous() for name in plan.inputs}, rows)
    return [found[b] for b in _buffers(plan)]


def _backward_fake(ts: list[Tensor], key: str, given: list[bool], rows: Any) -> list[Tensor]:
    segment = segment_of(key)
    plan, _ = segment.backward(_given(segment, given))
    return [_empty(ts[0], plan.buffers[b], rows) for b in _buffers(plan)]


def _hold(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    xs, ctx.key = inputs
    segment = segment_of(ctx.key)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(output[i] for i in segment.constant))
    if segment.wrt:
        kept_inputs, kept_results = segment.kept
        ctx.rows = xs[segment.row_input].shape[0]
        ctx.save_for_backward(*(xs[i] for i in kept_inputs), *(output[i] for i in kept_results))


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], None]:
    segment = segment_of(ctx.key)
    outputs = dict(zip((name for name, _ in segment.graph.outputs), grads, strict=False))
    asked = tuple(name for name in segment.floats if outputs[name] is not None)
    if not asked or not segment.wrt:
        return [None] * len(segment.graph.inputs), None
    names = segment.usable(asked)
    # incoming gradients may have any strides (a sum's is expanded); made contiguous out here, where Inductor can fuse
    cotangents = [_cotangent(ctx, segment, name, outputs[name]) for name in names]
    given = [name in names for name in outputs]
    held = [*ctx.saved_tensors, *cotangents]
    found = torch.ops.codetta.segment_backward(held, ctx.key, given, ctx.rows)
    plan, _ = segment.backward(names)
    memory = dict(zip(_buffers(plan), found, strict=True))
    views = {n: memory[v.buffer][v.rows[0] : v.rows[1]] if v.rows else memory[v.buffer] for n, v in plan.outputs}
    reached = segment.reached(asked)
    inputs = [str(n.attrs[0]) for n in segment.graph.inputs]
    return [views.get(cotangent_name(name)) if name in reached else None for name in inputs], None


def _cotangent(ctx: Any, segment: Segment, name: str, g: Tensor | None) -> Tensor:
    return _empty(ctx.saved_tensors[0], segment.type_of(name), ctx.rows).zero_() if g is None else g.contiguous()


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise UnsupportedError(
        "a segment of codetta has no second derivative",
        hint="differentiate without create_graph=True, or run this model without codetta",
    )


LIBRARY.impl("segment", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("segment_backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("codetta::segment", _forward_fake, lib=LIBRARY)
torch.library.register_fake("codetta::segment_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd("codetta::segment", _backward, setup_context=_hold, lib=LIBRARY)
torch.library.register_autograd("codetta::segment_backward", _no_second_derivative, lib=LIBRARY)
