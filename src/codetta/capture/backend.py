"""The entry point of torch.compile: a Dynamo graph in, a callable with segments in it out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from codetta import settings
from codetta.backends import prepare
from codetta.capture.block_attention import WIDE
from codetta.capture.embedding import take_embeddings
from codetta.capture.inductor import announce_ops
from codetta.capture.kernels import pack_stacks, target
from codetta.capture.logits import THROUGH, NoLogits, logits_outputs, outputs_of, without_outputs
from codetta.capture.loss_head import HeadTask, LossHead, head_memory, task_of, without_logits
from codetta.capture.mask import make_attention_causal
from codetta.capture.normalise import ignore_warning_loggers, normalise
from codetta.capture.options import BackendOptions, parse
from codetta.capture.segment import Capture, Segment, cut, token_rows
from codetta.capture.splice import splice
from codetta.capture.static import keep_static_inputs
from codetta.capture.wide import double_precision, widened
from codetta.errors import CaptureError, SettingsError
from codetta.ir.graph import Graph
from codetta.partition.plan import Plan
from codetta.runtime import library, registry
from codetta.runtime.compile import Options
from codetta.runtime.compile import Segment as Compiled

Run = Callable[..., Any]
log = logging.getLogger("codetta")
OPS = library.LIBRARY  # importing the library registers the ops that spliced graphs call
_TOLD: set[str] = set()
ignore_warning_loggers()


@dataclass(slots=True)
class CapturedGraph:
    """One graph that Dynamo handed over: normalised, cut, with what was proven of each attention call's mask, with its
    loss heads, and with the content key of each segment."""

    gm: GraphModule
    capture: Capture
    attention: list[str] = field(default_factory=list)
    heads: list[LossHead] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def compiled(self) -> Iterator[tuple[Segment, Compiled]]:
        """Each captured segment with what it was compiled to."""
        yield from zip(self.capture.segments, (registry.segment_of(k) for k in self.keys), strict=True)

    def tasks(self) -> list[HeadTask]:
        """What its loss heads do."""
        return [task_of(h.call) for h in self.heads]

    def given(self, index: int) -> tuple[str, ...]:
        """The outputs of a segment that get a gradient in a usual step: where the graph returns a loss, what it merely
        returns besides gets none."""
        returned = [n for n in outputs_of(self.gm) if isinstance(n, fx.Node)]
        losses = [n for n in returned if _is_loss(n)]
        found = []
        for j, (name, node) in enumerate(self.capture.segments[index].graph.outputs):
            at = [n for n, place in self.capture.place.items() if place == (index, j)]
            threaded = any(f.made_by == (index, j) for s in self.capture.segments for f in s.feeds)
            only_returned = at and not threaded and all(_only_returned(n) for n in at)
            if node.type.dtype.is_float and not (losses and only_returned and not any(n in losses for n in at)):
                found.append(name)
        return tuple(found)


def _is_loss(n: fx.Node) -> bool:
    value = n.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point() and value.requires_grad


def _only_returned(n: fx.Node) -> bool:
    """Whether nothing but the caller reads a value or a view of it."""
    return all(u.op == "output" or (u.target in THROUGH and _only_returned(u)) for u in n.users)


_RECORDERS: list[list[CapturedGraph]] = []


@contextmanager
def recording() -> Iterator[list[CapturedGraph]]:
    """Collect what is captured while the context is open."""
    found: list[CapturedGraph] = []
    _RECORDERS.append(found)
    try:
        yield found
    finally:
        _RECORDERS.remove(found)


def captured(model: Run, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> list[CapturedGraph]:
    """The graphs of one call of ``model``, in order. Works on the meta device, where nothing is computed."""
    # every call compiles the same code once more, which is no reason for Dynamo to give up
    unlimited = torch._dynamo.config.patch(recompile_limit=1_000_000, accumulated_recompile_limit=1_000_000)
    with unlimited, recording() as found:
        torch.compile(model, backend=partial(backend, options={"inner": "eager", **(options or {})}))(*args, **kwargs)
    return found


def backend(gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Run:
    """Compile a graph of Dynamo's. What is understood runs as segments, the rest as PyTorch runs it."""
    chosen = parse(options)
    ignore_warning_loggers()  # again: transformers may have been imported since
    # the hooks of a checkpoint around the compiled code count what autograd saves: nothing while we trace
    with torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing():
        return _compile(gm, example_inputs, chosen)


def _compile(gm: GraphModule, example_inputs: Sequence[Any], chosen: BackendOptions) -> Run:
    device = _device(example_inputs)
    if settings.disabled():
        return _inner(chosen, device)(gm, example_inputs)
    found = target(chosen, device, example_inputs)
    if found.why_not is not None:
        _warn_once(
            f"codetta has no kernels for this GPU: {found.why_not}. The graph goes to Inductor unchanged; "
            "options={'kernels': 'reference'} runs it on PyTorch operators, slowly"
        )
        return _inner(chosen, device)(gm, example_inputs)
    try:
        graph = normalise(gm, example_inputs)
    except CaptureError as error:
        warnings.warn(f"codetta leaves a graph to PyTorch unchanged: {error}", stacklevel=3)
        return _inner(chosen, device)(gm, example_inputs)
    inner = WIDE if chosen.widen else _inner_name(chosen, device)
    by_flash = chosen.attention == "auto" and not chosen.widen and found.backend == "hopper"
    attention = make_attention_causal(graph, inner, by_flash) if chosen.prove_masks else []
    if chosen.widen:
        graph = widened(graph)
    hidden = logits_outputs(graph) if chosen.logits == "never" else []
    fakes = without_outputs(graph, hidden)
    heads = without_logits(graph, head_memory(chosen.memory), chosen.logits == "never") if _own_head(chosen) else []
    packed = chosen.pack is True or (chosen.pack == "auto" and found.backend == "hopper")
    with ExitStack() as after:
        if chosen.rewrite:
            options = Options(found.backend, chosen.memory, packed, chosen.batch_invariant)
            graph, wait = _rewritten(graph, options, attention, heads)
            after.callback(wait)  # kernels are compiled while the graph around them is
            if torch.is_grad_enabled() and inner == "inductor":  # which alone writes where nobody looks any more
                take_embeddings(graph)
        if chosen.cudagraphs:
            keep_static_inputs(gm, graph)
        run = _inner(chosen, device)(graph, example_inputs)
    pack_stacks(graph, example_inputs, packed)  # now: AOT still compared real offsets with those Dynamo saw
    run = _in_modes(run, [device, "cpu"], chosen.widen)
    return _with_placeholders(run, hidden, fakes) if hidden else run


def _own_head(chosen: BackendOptions) -> bool:
    """Whether a head whose logits only its loss reads becomes one call. Its GEMMs are the library's in part, whose
    sums depend on the number of rows."""
    return chosen.rewrite and not chosen.widen and not chosen.batch_invariant and chosen.logits != "always"


def _rewritten(
    graph: GraphModule, options: Options, attention: list[str], heads: list[LossHead]
) -> tuple[GraphModule, Callable[[], None]]:
    """The graph with its segments as calls, and what waits for their kernels."""
    found = CapturedGraph(graph, cut(graph), attention, heads)
    keys: dict[tuple[Graph, tuple[bool, ...]], str] = {}

    def register(segment: Graph, requires_grad: tuple[bool, ...]) -> str:
        wanted = requires_grad if torch.is_grad_enabled() else (False,) * len(requires_grad)
        key = registry.register(segment, wanted, options)
        keys[segment, requires_grad] = key
        return key

    spliced = splice(graph, found.capture, register)
    found.keys = [keys[s.graph, s.requires_grad] for s in found.capture.segments]
    rows = max([*map(token_rows, found.capture.segments), *(t.sizes.tokens for t in found.tasks())], default=0)
    wait = prepare(options.backend, _plans(found), batch_invariant=options.batch_invariant, rows=rows or None)
    for recorder in _RECORDERS:
        recorder.append(found)
    parts = len(found.capture.segments), len(heads), len(found.capture.opaque)
    log.info("%d segments, %d loss heads, %d opaque calls", *parts)
    return spliced, wait


def _plans(found: CapturedGraph) -> Iterator[Plan]:
    """The plans that a training step runs."""
    for i, (_, compiled) in enumerate(found.compiled()):
        yield compiled.forward
        given = compiled.usable(found.given(i)) if compiled.wrt else ()
        if given:
            yield compiled.backward_plan(given)
    for task in found.tasks():
        yield from task.plans()


def _warn_once(message: str) -> None:
    """Tell what holds for every graph of a process once."""
    if message not in _TOLD:
        _TOLD.add(message)
        warnings.warn(message, stacklevel=4)


def _device(example_inputs: Sequence[Any]) -> str:
    kinds = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    return "cuda" if "cuda" in kinds else next(iter(kinds - {"cpu"}), "cpu")


def _inner_name(chosen: BackendOptions, device: str) -> str:
    return chosen.inner if chosen.inner != "auto" else "inductor" if device == "cuda" else "eager"


def _inner(chosen: BackendOptions, device: str) -> Callable[[GraphModule, Any], Run]:
    """Who runs the graph around the segments."""
    name = _inner_name(chosen, device)
    run: Callable[..., Run] = lookup_backend(name)
    if name == "inductor":
        announce_ops()
    if not chosen.cudagraphs:
        return run
    if name != "inductor":
        raise SettingsError(f"cudagraphs=True: {name} records none", hint="inner='inductor', the default on a GPU")
    return partial(run, config_patches={"triton.cudagraphs": True})


def _in_modes(run: Run, devices: Sequence[str], widen: bool) -> Run:
    """Casts are explicit in the graph, so autocast must not add its own."""

    def call(*args: Any) -> Any:
        with ExitStack() as modes:
            for d in devices:
                if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d):
                    modes.enter_context(torch.autocast(d, enabled=False))
            if widen:
                modes.enter_context(double_precision())
            return run(*args)

    return call


def _with_placeholders(run: Run, positions: list[int], fakes: list[Tensor]) -> Run:
    def call(*args: Any) -> Any:
        found = list(run(*args))
        for i, fake in zip(positions, fakes, strict=True):
            found[i] = NoLogits.like(fake)
        return tuple(found)

    return call
