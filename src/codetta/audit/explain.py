"""What became of a model: programs, leftovers with reasons, opaque calls with reasons, bytes, and time."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import Tensor, fx, nn

from codetta.audit import report
from codetta.audit.blocks import calls_of
from codetta.audit.heads import EMPTY, head_parts
from codetta.audit.models import as_batch
from codetta.audit.parts import Half, Opaque, Part, half_of
from codetta.backends.hopper.choose import is_bare, why_split
from codetta.capture.backend import CapturedGraph, captured
from codetta.capture.logits import outputs_of
from codetta.capture.names import layer_of
from codetta.capture.normalise import is_parameter
from codetta.capture.segment import Segment, token_rows
from codetta.capture.traffic import eager_bytes
from codetta.core.types import bf16, f16
from codetta.partition.lifetime import Peak, peak, peak_of
from codetta.partition.plan import Plan, plan_text
from codetta.partition.training import plan_boundary_fusion
from codetta.rules.norm import rounded_before_gain
from codetta.runtime.compile import Segment as Compiled

CACHE_NOTE = (
    "this call returns every layer's keys and values, which stay alive and must be written out: in training, set "
    "model.config.use_cache = False"
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``codetta.explain`` found; ``plans`` are the forward and the backward plan of each key."""

    title: str
    graphs: int
    parts: tuple[Part, ...]
    opaque: tuple[Opaque, ...]
    plans: dict[str, tuple[Plan, Plan]]
    notes: tuple[str, ...] = ()

    @property
    def forward(self) -> Half:
        """The sum over segments."""
        return sum((p.forward for p in self.parts), Half(opaque=sum(o.count for o in self.opaque)))

    @property
    def backward(self) -> Half:
        """The sum over segments."""
        return sum((p.backward for p in self.parts), Half(opaque=sum(o.differentiable for o in self.opaque)))

    def to_json(self) -> dict[str, Any]:
        """As JSON; the programs of equal segments once, by key."""
        segments = [
            {
                "key": p.key,
                "layers": list(p.layers),
                "tokens": p.rows,
                "peak_bytes": p.memory.bytes,
                "held_bytes": p.memory.between,
                "note": p.note,
                "forward": p.forward.to_json(),
                "backward": p.backward.to_json(),
            }
            for p in self.parts
        ]
        return {
            "model": self.title,
            "graphs": self.graphs,
            "forward": self.forward.to_json(),
            "backward": self.backward.to_json(),
            "segments": segments,
            "opaque_calls": [asdict(o) for o in self.opaque],
            "programs": {k: {"forward": plan_text(f), "backward": plan_text(b)} for k, (f, b) in self.plans.items()},
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        return Group(
            Text(self.title, style="bold"),
            "",
            report.summary(self.forward, self.backward),
            "",
            report.leftovers(self.parts),
            "",
            report.outside(self.opaque),
            *(Text(f"\nnote: {n}") for n in self.notes),
            "",
            *report.programs(self.parts, self.plans),
        )

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120)
        with console.capture() as text:
            console.print(self, crop=False)
        return text.get()


def explain(
    model: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, title: str = "", **kwargs: Any
) -> Explanation:
    """What ``torch.compile(model, backend="codetta")`` makes of this call; a single dict is taken as keyword arguments.

    On the meta device nothing is computed. Elsewhere the model runs forward once."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        kwargs = as_batch(model, args[0])
        args = ()
    # on a GPU too, the plans are what is asked for; and for this very call, whatever sizes were compiled before
    chosen = {"kernels": "reference", **(options or {})}
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        graphs = captured(model, *args, options=chosen, **kwargs)
    notes = [CACHE_NOTE] if _returns_caches(model, graphs) else []
    if len(graphs) > 1:
        notes.append(f"Dynamo split this call into {len(graphs)} graphs; no segment crosses from one to another")
    return explain_graphs(graphs, title=title or type(model).__name__, notes=notes)


def explain_blocks(model: nn.Module, batch: Mapping[str, Any], *, title: str = "") -> Explanation:
    """What becomes of each of the model's blocks, compiled alone."""
    graphs: list[CapturedGraph] = []
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for call in calls_of(model, batch):
            graphs += captured(call.block, *call.args, options={"kernels": "reference"}, **call.kwargs)
    return explain_graphs(graphs, title=title or type(model).__name__)


def explain_graphs(graphs: Sequence[CapturedGraph], *, title: str, notes: Iterable[str] = ()) -> Explanation:
    """The explanation of captured graphs."""
    known: dict[tuple[str, int], tuple[Half, Half, Peak]] = {}
    plans: dict[str, tuple[Plan, Plan]] = {}
    parts: list[Part] = []
    for graph in graphs:
        for i, (segment, compiled) in enumerate(graph.compiled()):
            key, rows = graph.keys[i], token_rows(segment)
            if (key, rows) not in known:
                given = compiled.usable(graph.given(i)) if compiled.wrt else ()
                plans[key] = compiled.forward, compiled.backward(given)[0] if given else EMPTY
                known[key, rows] = (*_halves(graph, i, compiled, given, rows), _peak(compiled, given, rows))
            parts.append(Part(key, weight_layers(segment), rows, *known[key, rows]))
        for head in head_parts(graph):
            plans[head.part.key] = head.plans
            parts.append(head.part)
    notes = [*notes, *attention_notes(graphs), *rounding_notes(graphs), *kernel_notes(plans.values())]
    if not any(p.forward.gemms for p in parts):
        notes = [*notes, "nothing was understood: no segment contains a GEMM"]
    return Explanation(title, len(graphs), tuple(parts), tuple(opaque_calls(graphs)), plans, tuple(notes))


def attention_notes(graphs: Iterable[CapturedGraph]) -> list[str]:
    """What became of attention masks: a line for each outcome, and how often."""
    lines = [line.partition(": ") for graph in graphs for line in graph.attention]
    counts = Counter(outcome for _, _, outcome in lines)
    return [f"attention x{count}: {outcome}" for outcome, count in counts.items()]


def rounding_notes(graphs: Iterable[CapturedGraph]) -> list[str]:
    """Which norms round before their gain: the model's order, and ours."""
    nodes = [n for g in graphs for s in g.capture.segments for n in s.graph.nodes]
    counts = Counter(dtype for n in nodes if (dtype := rounded_before_gain(n)) is not None)
    return [
        f"norms x{count}: the model rounds to {dtype} before the gain; here the gain is multiplied in float32, and the "
        "product rounded once. codetta.verify shows both errors"
        for dtype, count in counts.items()
    ]


def kernel_notes(plans: Iterable[tuple[Plan, Plan]]) -> list[str]:
    """Programs that are no single kernel on a Hopper GPU, by the reason: a line each."""
    return [
        f"on a Hopper GPU {', '.join(names)} would run as a GEMM and a generated kernel behind it: {reason}"
        for reason, names in split_programs(plans).items()
    ]


def split_programs(plans: Iterable[tuple[Plan, Plan]]) -> dict[str, tuple[str, ...]]:
    """The names of programs that are no single kernel on a Hopper GPU, by the reason."""
    steps = [s for pair in plans for plan in pair for s in plan.steps if s.kind == "gemm" and not is_bare(s.program)]
    found: dict[str, dict[str, None]] = {}
    for s in steps:
        reason = why_split(s.program) if s.program.gemm and s.program.gemm.dtype in (bf16, f16) else None
        if reason is not None:
            found.setdefault(reason, {})[s.program.name] = None
    return {reason: tuple(names) for reason, names in found.items()}


def weight_layers(segment: Segment) -> tuple[str, ...]:
    """The layers that a segment's weights belong to, in order."""
    sources = [f.border.source for f in segment.feeds]
    found = [layer_of(n) for n in sources if n.op == "placeholder" and is_parameter(n)]
    return tuple(dict.fromkeys(filter(None, found)))


def opaque_calls(graphs: Iterable[CapturedGraph]) -> list[Opaque]:
    """The operators that stay with PyTorch, alike ones together."""
    found: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    for graph in graphs:
        nodes = {n.name: n for n in graph.gm.graph.nodes}
        for call in graph.capture.opaque:
            value = nodes[call.name].meta.get("val")
            wanted = isinstance(value, Tensor) and value.requires_grad
            key = (report.operator(call.op), report.plain_reason(call.reason))
            found.setdefault(key, []).append((call.module, wanted))
    return [
        Opaque(name, reason, len(calls), sum(wanted for _, wanted in calls), tuple(dict.fromkeys(m for m, _ in calls)))
        for (name, reason), calls in found.items()
    ]


def _halves(graph: CapturedGraph, i: int, compiled: Compiled, given: tuple[str, ...], rows: int) -> tuple[Half, Half]:
    forward, backward = compiled.forward, compiled.backward(given)[0] if given else EMPTY
    eager = eager_bytes(graph.gm, graph.capture, i)
    fusion = plan_boundary_fusion(compiled.graph, compiled.wrt, given)
    return half_of(forward, rows, eager[0], fusion[0]), half_of(backward, rows, eager[1] if given else 0, fusion[1])


def _peak(compiled: Compiled, given: tuple[str, ...], rows: int) -> Peak:
    if not given:
        return Peak(peak_of(compiled.forward, rows), 0)
    return peak(replace(compiled.training, backward=compiled.backward_plan(given)), rows)


def _returns_caches(model: nn.Module, graphs: Sequence[CapturedGraph]) -> bool:
    """Whether a graph returns keys and values: a model that may cache, and outputs of four dimensions."""
    if not getattr(getattr(model, "config", None), "use_cache", False):
        return False
    values = [n.meta.get("val") for g in graphs for n in outputs_of(g.gm) if isinstance(n, fx.Node)]
    return any(isinstance(v, Tensor) and v.dim() == 4 for v in values)
