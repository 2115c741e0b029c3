"""A graph's LM head with its loss as one call of ``linear_cross_entropy``, where nobody reads the logits.

Understood is what models put between the linear layer and the loss: views, casts, a factor, a cap by tanh. The segment
before the head then ends in front of it; what is not understood stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import eq
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import statically_known_true

from codetta.backends.hopper.support import why_not
from codetta.backends.reference.evaluate import DTYPE_OF
from codetta.capture.cacheable import cacheable
from codetta.capture.layout import size_hint
from codetta.errors import CaptureError
from codetta.nn.head_graphs import LSE, TARGET, TOTAL, Head
from codetta.nn.head_run import slab_plans
from codetta.nn.linear_cross_entropy import Memory, linear_cross_entropy, mode_of
from codetta.nn.slabs import EXPONENTIALS, GRAIN, Sizes, Slab, slabs
from codetta.partition.plan import Plan

aten = torch.ops.aten
REDUCTION = ("none", "mean", "sum")
VIEWS = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.contiguous.default, aten.alias.default),
}
Cut = tuple[int, int | None, int | None, int]  # a dimension, start, stop and step
CASTS = {aten.to.dtype, aten.type_as.default, aten._to_copy.default}


@dataclass(frozen=True, slots=True)
class LossHead:
    """A head as one call, and the operators that it stands for as a graph of their own, with what enters that."""

    call: fx.Node
    replaced: GraphModule
    sources: tuple[fx.Node, ...]


@dataclass(frozen=True)
class HeadTask:
    """What a captured head computes, in plain terms: of how many tokens, which statistics, the gradients of which of x,
    weight and bias, and how logits are held. Compiled, a head lends no memory."""

    head: Head
    sizes: Sizes
    names: tuple[str, ...]
    wanted: tuple[str, ...]
    mode: str

    @property
    def stored(self) -> bool:
        """Whether forward stores logits, or their exponentials."""
        return self.mode in ("fast", EXPONENTIALS) and bool(self.wanted)

    @property
    def held(self) -> tuple[Slab, ...]:
        """Its slabs."""
        return slabs(self.sizes, self.mode, False)

    def plans(self) -> list[Plan]:
        """What is run of a training step."""
        mode, trains = (self.mode, True) if self.wanted else ("lean", False)
        return slab_plans(self.head, self.sizes, mode, False, self.names, trains=trains)


@dataclass(frozen=True, slots=True)
class _Chain:
    """From the loss up: the linear layer, which of its rows, the factor and the cap of its logits."""

    linear: fx.Node
    rows: tuple[Cut, ...]
    scale: float
    softcap: float | None


def head_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, rows: tuple[Cut, ...] = (),
    dtype: torch.dtype, **options: Any,
) -> Tensor:  # fmt: skip
    """The loss of some rows of x, in ``dtype``."""
    for cut in rows:
        x = aten.slice.Tensor(x, *cut)
    found: Tensor = linear_cross_entropy(x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1), bias, **options)
    return found.to(dtype)


def task_of(call: fx.Node) -> HeadTask:
    """What a call of ``head_loss`` does in the example that it was captured with."""
    x, weight, bias, targets = (a.meta["val"] if isinstance(a, fx.Node) else None for a in call.args)
    if x is None or weight is None or targets is None:
        raise CaptureError(f"{call.name} is a head without x, weight or targets")
    options: dict[str, Any] = dict(call.kwargs)
    after = options["logit_scale"] or 1.0, options["softcap"]
    head = Head(int(x.shape[-1]), DTYPE_OF[x.dtype], None if bias is None else DTYPE_OF[bias.dtype], *after)
    columns, width = int(weight.shape[0]), head.dtype.bytes
    tokens = prod(map(size_hint, targets.shape))
    sizes = Sizes(tokens, head.features, columns, width, fused=width == 2 and head.features % GRAIN == 0)
    names = (LSE, TARGET, *([TOTAL] if options["label_smoothing"] else []))
    given = {"x": x, "weight": weight, "bias": bias} if call.meta["val"].requires_grad else {}
    wanted = tuple(n for n, t in given.items() if t is not None and t.requires_grad)
    return HeadTask(head, sizes, names, wanted, mode_of(head, names, sizes, options["memory"], False, x.device))


def head_memory(memory: str) -> Memory:
    """How a head holds its logits, by the backend's option for what forward keeps."""
    return "fast" if memory == "fast" else "lean" if memory == "lean" else "auto"


def without_logits(gm: GraphModule, memory: Memory, always: bool) -> list[LossHead]:
    """Replace every head whose logits only its loss reads; returns those. Unless ``always``, not where the
    call would keep logits: one that keeps them is as fast inside its segment, and the norm before it faster."""
    losses = [n for n in gm.graph.nodes if n.target is aten.cross_entropy_loss.default]
    found = [head for n in losses if (head := _replaced(gm, n, memory, always)) is not None]
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return found


def _replaced(gm: GraphModule, loss: fx.Node, memory: Memory, always: bool) -> LossHead | None:
    logits, targets, weight, reduction, ignored, smoothing = _arguments(loss)
    chain = _chain(logits)
    if chain is None or weight is not None or targets.meta["val"].is_floating_point():
        return None
    x, w, *bias = chain.linear.args
    dtype = loss.meta["val"].dtype
    wide = dtype == torch.float64 and x.meta["val"].dtype != dtype  # type: ignore[union-attr]
    if wide or logits.meta["val"].dim() != 2:
        return None
    options: dict[str, Any] = {
        "rows": chain.rows,
        "dtype": dtype,
        "ignore_index": ignored,
        "reduction": REDUCTION[reduction],
        "label_smoothing": smoothing,
        "softcap": chain.softcap,
        "logit_scale": None if chain.scale == 1.0 else chain.scale,
        "memory": memory,
    }
    args = (x, w, bias[0] if bias else None, targets)
    with gm.graph.inserting_before(loss):
        call = gm.graph.call_function(head_loss, args, options)
    # how logits are held, and so what is saved, hangs on whether kernels run there
    call.meta = loss.meta | cacheable(why_not(x.meta["val"].device) is None)  # type: ignore[union-attr]
    if not always and task_of(call).mode == "fast":
        gm.graph.erase_node(call)
        return None
    replaced, sources = _apart(gm, loss, [a for a in args if isinstance(a, fx.Node)])
    loss.replace_all_uses_with(call)
    gm.graph.erase_node(loss)
    return LossHead(call, replaced, sources)


def _apart(gm: GraphModule, loss: fx.Node, entering: list[fx.Node]) -> tuple[GraphModule, tuple[fx.Node, ...]]:
    """The operators between what enters and the loss as a graph of their own, and its sources in order."""
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in entering}

    def copy(n: fx.Node) -> fx.Node:
        if n not in copies:
            copies[n] = graph.placeholder(n.name) if n.op == "placeholder" else graph.node_copy(n, copy)
        return copies[n]

    graph.output(copy(loss))
    return GraphModule(gm, graph), tuple(n for n, c in copies.items() if c.op == "placeholder")


def _arguments(loss: fx.Node) -> tuple[fx.Node, fx.Node, Any, int, int, float]:
    defaults: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given = dict(zip(("self", "target", *defaults), loss.args, strict=False))
    found = {**defaults, **given, **loss.kwargs}
    return tuple(found[n] for n in ("self", "target", *defaults))


def _chain(loss: Any) -> _Chain | None:
    cuts: list[fx.Node] = []
    n, softcap = _above(loss, cuts), None
    found = _factor(n)
    n, scale = (n, 1.0) if found is None else (_above(found[0], cuts), found[1])
    if _is(n, aten.tanh.default):  # and the factor is the cap
        below = _factor(_above(n.args[0], cuts))
        if below is None or abs(below[1] * scale - 1.0) > 1e-6:
            return None
        n, softcap, scale = _above(below[0], cuts), scale, 1.0
        if (found := _factor(n)) is not None:
            n, scale = _above(found[0], cuts), found[1]
    rows = _rows(n, cuts) if _is(n, aten.linear.default) else None
    return None if rows is None else _Chain(n, rows, scale, softcap)


def _above(n: Any, cuts: list[fx.Node]) -> Any:
    """The value behind views that keep columns, slices of rows, which are told, and casts to wider floats; as long as
    nobody else reads it."""
    while isinstance(n, fx.Node) and len(n.users) == 1:
        if n.target is aten.slice.Tensor and _keeps_columns(n):
            cuts.append(n)
        elif not (n.target in VIEWS and _keeps_columns(n)) and not (n.target in CASTS and _widens(n)):
            return n
        n = n.args[0]
    return n if isinstance(n, fx.Node) and len(n.users) == 1 else None


def _keeps_columns(n: fx.Node) -> bool:
    """Whether the last dimension stays what it is, so that rows of logits stay whole."""
    source, value = n.args[0].meta["val"], n.meta["val"]  # type: ignore[union-attr]
    return source.dim() > 0 and value.dim() > 0 and statically_known_true(source.shape[-1] == value.shape[-1])


def _rows(linear: fx.Node, cuts: list[fx.Node]) -> tuple[Cut, ...] | None:
    """Slices of logits, given from the last to the first, as slices of the linear layer's input; None where something
    else came before one of them, or where a bound is no plain number."""
    found: list[Cut] = []
    shape = linear.meta["val"].shape
    for n in reversed(cuts):
        source = n.args[0].meta["val"]  # type: ignore[union-attr]
        same = source.dim() == len(shape) and all(map(statically_known_true, map(eq, source.shape, shape)))
        given: list[Any] = list(n.args[1:])
        dim, start, stop, step = given + [0, None, None, 1][len(given) :]
        if not same or any(isinstance(a, fx.Node) for a in (dim, start, stop, step)):
            return None
        if dim % len(shape) != len(shape) - 1:  # of columns, it takes all
            found.append((dim % len(shape), start, stop, step))
        shape = n.meta["val"].shape
    return tuple(found)


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
