"""The torch ops behind every segment: ``codetta::segment``, what it runs, and its backward, with fakes and autograd.

``segment`` is what a graph calls; where autograd has had its turn, which is also in what AOTAutograd traces, it is
``segment_forward``, on whose way to the kernels there is nothing but this file's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from codetta.backends.reference.evaluate import TORCH
from codetta.backends.stacked import STATISTICS
from codetta.core.types import Type
from codetta.errors import UnsupportedError
from codetta.partition.training import cotangent_name
from codetta.runtime.compile import Segment
from codetta.runtime.pack import tell_copies
from codetta.runtime.registry import segment_of

NOTHING: frozenset[str] = frozenset()
LIBRARY = torch.library.Library("codetta", "DEF")
# xs are the segment's inputs; the results are its outputs, then what only backward needs. ``call`` tells apart calls
# that are otherwise the same: were two taken for one, the first backward could write over what the second reads.
LIBRARY.define("segment(Tensor[] xs, str key, int call) -> Tensor[]")
LIBRARY.define("segment_forward(Tensor[] xs, str key, int call) -> Tensor[]")
# ts are what autograd held (Segment.kept: inputs, then results), then the cotangents of the outputs that are `given`.
# Where the graph is not kept, results that only backward can see are given up: they may hold anything afterwards. The
# schema says nothing of it, as functionalisation would copy them first; nobody else reads them, and nobody can later.
LIBRARY.define("segment_backward(Tensor[] ts, str key, bool[] given, SymInt rows) -> Tensor[]")


def keeps_graph() -> bool:
    """Whether the backward pass that is running may be asked for again (``retain_graph``); True outside of one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def kept_for_later(ts: list[Tensor]) -> bool:
    """Whether what forward held may be asked for again: where the graph is kept, and in a CUDA graph, which is replayed
    for whoever asks later, also where the graph is kept then."""
    return keeps_graph() or (ts[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _forward(xs: list[Tensor], key: str, call: int) -> list[Tensor]:
    segment = segment_of(key)
    copies = STATISTICS.copies
    inputs = dict(zip(segment.names, [x.contiguous() for x in xs], strict=True))
    found = segment.run_forward.run(inputs, xs[segment.row_input].shape[0])
    if STATISTICS.copies != copies and segment.options.packed:
        tell_copies([(tuple(segment.names[i] for i in g), [xs[i] for i in g]) for g in segment.stacks])
    # no two results of an op may share memory: a buffer that is asked for again is copied
    return [found[b] if first else found[b].clone() for b, first in segment.result_buffers]


def _empty(like: Tensor, t: Type, rows: Any) -> Tensor:
    sizes = [s if isinstance(s, int) else rows for s in (t.rows, t.cols) if s is not None]
    return like.new_empty(sizes, dtype=TORCH[t.dtype])


def _forward_fake(xs: list[Tensor], key: str, call: int) -> list[Tensor]:
    segment = segment_of(key)
    rows = xs[segment.row_input].shape[0]
    return [_empty(xs[0], segment.type_of(name), rows) for name in segment.results]


def _backward_op(ts: list[Tensor], key: str, given: list[bool], rows: int) -> list[Tensor]:
    call = segment_of(key).backward_call(tuple(given))
    feed = {name: ts[i].contiguous() for name, i in call.feed}
    found = call.run.run(feed, rows, NOTHING if kept_for_later(ts) else call.given_up)
    return [found[b] for b in call.buffers]


def _backward_fake(ts: list[Tensor], key: str, given: list[bool], rows: Any) -> list[Tensor]:
    call = segment_of(key).backward_call(tuple(given))
    return [_empty(ts[0], call.plan.buffers[b], rows) for b in call.buffers]


class _Differentiable(torch.autograd.Function):
    """A segment as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, key: str, call: int, *xs: Tensor) -> tuple[Tensor, ...]:
        """The results; what backward needs is held."""
        results = _below(list(xs), key, call)
        segment = segment_of(key)
        ctx.key = key
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(results[i] for i in segment.constant))
        if segment.wrt:
            kept_inputs, kept_results = segment.kept
            ctx.rows = xs[segment.row_input].shape[0]
            ctx.save_for_backward(*(xs[i] for i in kept_inputs), *(results[i] for i in kept_results))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs."""
        segment = segment_of(ctx.key)
        outputs = dict(zip((name for name, _ in segment.graph.outputs), grads, strict=False))
        asked = tuple(name for name in segment.floats if outputs[name] is not None)
        if not asked or not segment.wrt:
            return (None,) * (2 + len(segment.names))
        names = segment.usable(asked)
        # incoming gradients may have any strides (a sum's is expanded); made contiguous here, where Inductor can fuse
        cotangents = [_cotangent(ctx, segment, name, outputs[name]) for name in names]
        given = [name in names for name in outputs]
        held = [*ctx.saved_tensors, *cotangents]
        found = torch.ops.codetta.segment_backward(held, ctx.key, given, ctx.rows)
        call = segment.backward_call(tuple(given))
        memory = dict(zip(call.buffers, found, strict=True))
        views = {n: memory[v.buffer][slice(*v.rows)] if v.rows else memory[v.buffer] for n, v in call.plan.outputs}
        reached = segment.reached(asked)
        return None, None, *(views.get(cotangent_name(n)) if n in reached else None for n in segment.names)


def _below(xs: list[Tensor], key: str, call: int) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        found: list[Tensor] = torch.ops.codetta.segment_forward(xs, key, call)
    return found


def _segment(xs: list[Tensor], key: str, call: int) -> list[Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return list(_Differentiable.apply(key, call, *xs))
    return _below(xs, key, call)


def _cotangent(ctx: Any, segment: Segment, name: str, g: Tensor | None) -> Tensor:
    return _empty(ctx.saved_tensors[0], segment.type_of(name), ctx.rows).zero_() if g is None else g.contiguous()


def no_second_derivative(what: str, instead: str) -> Callable[..., Any]:
    """The backward of a backward: an error that says what to do instead."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            f"{what} has no second derivative", hint=f"differentiate without create_graph=True, or {instead}"
        )

    return refuse


LIBRARY.impl("segment", _segment, "Autograd")
LIBRARY.impl("segment", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("segment_forward", torch.library.fallthrough_kernel, "Autograd")
LIBRARY.impl("segment_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("segment_backward", _backward_op, "CompositeExplicitAutograd")
for name in ("segment", "segment_forward"):
    torch.library.register_fake(f"codetta::{name}", _forward_fake, lib=LIBRARY)
torch.library.register_fake("codetta::segment_backward", _backward_fake, lib=LIBRARY)
SEGMENT_TWICE = no_second_derivative("a segment of codetta", "run this model without codetta")
torch.library.register_autograd("codetta::segment_backward", SEGMENT_TWICE, lib=LIBRARY)
