"""The torch ops behind ``linear_cross_entropy``: ``codetta::head`` gives the statistics of each row of logits.

``head`` is what is called; where autograd has had its turn it is ``head_forward``, which also returns what is held for
backward. A backward whose graph is not kept writes over the logits that forward held: nobody else reads them, and
nobody can later. The schema says nothing of it, as functionalisation would copy them first; calls are numbered, so that
a compiler does not take two for one. Memory that is lent, and comes back as the weight's gradient, is for eager mode
alone: a compiler may reuse what it believes to be dead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from codetta.backends.reference.evaluate import DTYPE_OF
from codetta.nn import exponentials
from codetta.nn.head_graphs import DIFFERENTIABLE, LSE, Head
from codetta.nn.head_run import NOTHING_HELD, Call, Wanted, What, backward, forward
from codetta.nn.slabs import EXPONENTIALS, cut
from codetta.runtime.library import keeps_graph, kept_for_later, no_second_derivative

LIBRARY = torch.library.Library("codetta", "FRAGMENT")
_CALLS = count(1)
# ts are x, the weight, the targets' columns and, where there are any, the shift and the bias (Call); what is What's
# text; wanted and given are names of statistics; kept is the log-sum-exp, then what forward held; needed says whose
# gradients are asked.
LIBRARY.define("head(Tensor[] ts, str what, str wanted) -> Tensor[]")
LIBRARY.define("head_forward(Tensor[] ts, str what, str wanted) -> Tensor[]")
LIBRARY.define(
    "head_backward(Tensor[] ts, str what, Tensor[] kept, Tensor[] grads, str given, bool[3] needed) -> Tensor[]"
)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether PyTorch runs these tensors' ops one by one, at once: nobody traces or watches."""
    quiet = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0
    return quiet and all(t is None or type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _call(ts: Sequence[Tensor], what: str) -> Call:
    x, weight, index, *more = ts
    shift = more.pop(0) if shifts(x.dtype) else None
    return Call(What.read(what), x, weight, index, more[0] if more else None, shift)


def shifts(dtype: torch.dtype) -> bool:
    """Whether a head of that dtype is given a shift."""
    return Head(1, DTYPE_OF[dtype]).shifts


@contextmanager
def _as_written(ts: list[Tensor]) -> Iterator[None]:
    """Without gradients, and without autocast, which would round the products of whoever asks for float32."""
    with torch.no_grad(), torch.autocast(ts[0].device.type, enabled=False):
        yield


def _forward(ts: list[Tensor], what: str, wanted: str) -> list[Tensor]:
    with _as_written(ts):
        call = _call(ts, what)
        by_exponentials = call.what.mode == EXPONENTIALS
        found, held = exponentials.forward(call) if by_exponentials else forward(call, _names(wanted))
    return [*found, *held]


def _forward_fake(ts: list[Tensor], what: str, wanted: str) -> list[Tensor]:
    call = _call(ts, what)
    x, columns = call.x, call.weight.shape[0]
    sums = x.new_empty(x.shape[:1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    if call.what.mode == EXPONENTIALS:
        held = [x.new_empty((x.shape[0], columns)), torch.empty_like(sums), torch.empty_like(sums)]
        return [*(torch.empty_like(sums) for _ in _names(wanted)), *held]
    whole = tuple(cut(0, columns, columns, "own")) if call.what.mode == "fast" else ()
    cuts = call.slabs if call.what.lends else whole
    held = [x.new_empty((x.shape[0], s.columns)) for s in cuts if s.how == "own"]
    memory = [x.new_empty(call.weight.numel())] if any(s.how == "lent" for s in cuts) else []
    return [*(torch.empty_like(sums) for _ in _names(wanted)), *held, *memory]


def _statistics(ts: list[Tensor], what: str, wanted: str) -> list[Tensor]:
    return _forward(ts, what, wanted)[: len(_names(wanted))]


def _statistics_fake(ts: list[Tensor], what: str, wanted: str) -> list[Tensor]:
    return _forward_fake(ts, what, wanted)[: len(_names(wanted))]


def _backward(
    ts: list[Tensor], what: str, kept: list[Tensor], grads: list[Tensor], given: str, needed: list[bool]
) -> list[Tensor]:
    return _gradients(
        ts, what, kept, grads, given, needed, given_up=not What.read(what).lends and not kept_for_later(ts)
    )


def _gradients(
    ts: list[Tensor],
    what: str,
    kept: list[Tensor],
    grads: list[Tensor],
    given: str,
    needed: list[bool],
    *,
    given_up: bool,
) -> list[Tensor]:
    lse, *held = kept
    named = dict(zip(_names(given), grads, strict=True))
    with _as_written(ts):
        call, asked = _call(ts, what), Wanted(*needed)
        if call.what.mode == EXPONENTIALS:
            found = exponentials.backward(call, held, named, asked)
        else:
            found = backward(call, lse, held, named, asked, given_up)
    return [g for g in found if g is not None]


def _backward_fake(
    ts: list[Tensor], what: str, kept: list[Tensor], grads: list[Tensor], given: str, needed: list[bool]
) -> list[Tensor]:
    call = _call(ts, what)
    likes = zip((call.x, call.weight, call.bias), needed, strict=True)
    return [torch.empty_like(t) for t, is_needed in likes if is_needed and t is not None]


class _Differentiable(torch.autograd.Function):
    """The statistics as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, what: str, wanted: str, *ts: Tensor) -> tuple[Tensor, ...]:
        """The statistics; what backward needs is held."""
        names = _names(wanted)
        with torch._C._AutoDispatchBelowAutograd():
            found = torch.ops.codetta.head_forward(ts, what, wanted)
        statistics, held = found[: len(names)], found[len(names) :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for n, t in zip(names, statistics, strict=True) if n not in DIFFERENTIABLE))
        ctx.save_for_backward(*ts, statistics[names.index(LSE)], *held)
        ctx.what, ctx.names, ctx.count = what, names, len(ts)
        return tuple(statistics)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The gradients of x, weight and bias."""
        named = {n: g for n, g in zip(ctx.names, grads, strict=True) if g is not None and n in DIFFERENTIABLE}
        x, weight, *more = ctx.needs_input_grad[2:]  # the others are the index, which has none, the shift, the bias
        needed = [x, weight, any(more)]
        if not named or not any(needed):
            return tuple(None for _ in ctx.needs_input_grad)
        saved = ctx.saved_tensors
        ts, kept = list(saved[: ctx.count]), list(saved[ctx.count :])
        cotangents = [g.contiguous() for g in named.values()]
        given = (ts, ctx.what, kept, cotangents, ",".join(named), needed)
        if is_plain(*ts, *kept, *cotangents) and not torch.is_grad_enabled():
            found = iter(_gradients(*given, given_up=not keeps_graph()))
        else:
            found = iter(torch.ops.codetta.head_backward(*given))
        dx, dw, db = (next(found) if is_needed else None for is_needed in needed)
        return None, None, dx, dw, *[None for _ in more[1:]], db


def _head(ts: list[Tensor], what: str, wanted: str) -> list[Tensor]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in ts):
        numbered = what if is_plain(*ts) else replace(What.read(what), call=next(_CALLS)).text
        return list(_Differentiable.apply(numbered, wanted, *ts))
    nothing = replace(What.read(what), mode=NOTHING_HELD, lends=False)
    with torch._C._AutoDispatchBelowAutograd():
        return list(torch.ops.codetta.head_forward(ts, nothing.text, wanted))


LIBRARY.impl("head", _head, "Autograd")
LIBRARY.impl("head", _statistics, "CompositeExplicitAutograd")
LIBRARY.impl("head_forward", torch.library.fallthrough_kernel, "Autograd")
LIBRARY.impl("head_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("head_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("codetta::head", _statistics_fake, lib=LIBRARY)
torch.library.register_fake("codetta::head_forward", _forward_fake, lib=LIBRARY)
torch.library.register_fake("codetta::head_backward", _backward_fake, lib=LIBRARY)
HEAD_TWICE = no_second_derivative("linear_cross_entropy", "use torch.nn.functional.cross_entropy")
torch.library.register_autograd("codetta::head_backward", HEAD_TWICE, lib=LIBRARY)
