"""Where a compiled model goes wrong first: activations and gradients, layer by layer, in the order of execution."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from codetta.audit.blocks import blocks_of
from codetta.audit.models import Subject
from codetta.audit.verify import COLUMNS, SEEDS, Compared, errors_of, judged, rule_text
from codetta.testing import Bar

ACTIVATION = "activation"
OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's errors, and the layer that it belongs to: of a module outside of all layers, that module's name."""

    layer: str
    tensor: Compared

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"layer": self.layer, **self.tensor.to_json()}

    def __str__(self) -> str:
        return f"{self.layer}, {self.tensor.kind} {self.tensor.name}: {self.tensor.problem or 'clears the bar'}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """What ``codetta verify --per-layer`` found: tensors in the order in which they come to be, forward (what each
    layer gives), then backward (gradients of parameters). ``inside`` are the activations of the first layer's own
    modules, if its result misses the bar."""

    title: str
    seeds: int
    bar: Bar
    tensors: tuple[Placed, ...]
    inside: tuple[Placed, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Placed | None:
        """The first tensor past the bar, or None."""
        return next((p for p in self.tensors if p.tensor.problem), None)

    @property
    def first_inside(self) -> Placed | None:
        """The first activation past the bar inside of the first layer that has one, or None."""
        return next((p for p in self.inside if p.tensor.problem), None)

    @property
    def ok(self) -> bool:
        """Whether every tensor clears the bar."""
        return self.first is None

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        first, inside = self.first, self.first_inside
        return {
            "ok": self.ok,
            "model": self.title,
            "seeds": self.seeds,
            "first": first and first.to_json(),
            "first_inside": inside and inside.to_json(),
            "tensors": [p.to_json() for p in self.tensors],
            "inside": [p.to_json() for p in self.inside],
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        table = Table("", "layer", *COLUMNS, box=None, pad_edge=False, title=self.title, title_justify="left")
        for direction, p in _worst(self.tensors):
            table.add_row(direction, escape(p.layer), *p.tensor.cells())
        for p in self.inside:
            table.add_row("inside", escape(p.layer), *p.tensor.cells())
        rows = "a row is a layer's first tensor past the bar, or that of the largest ratio"
        return Group(table, "", rule_text(self.bar, self.seeds), rows, *self.notes, *self._verdict())

    def _verdict(self) -> list[str]:
        if self.first is None:
            return ["[green]no tensor misses the bar[/green]"]
        lines = [f"[red]first past the bar: {escape(str(self.first))}[/red]"]
        if self.first_inside is not None:
            lines.append(f"[red]inside of it: {escape(str(self.first_inside))}[/red]")
        elif self.inside:
            lines.append("inside of it nothing is past the bar: it is not so where each module's result is stored")
        return lines

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160)
        with console.capture() as text:
            console.print(self)
        return text.get()


def check_layers(
    subject: Subject,
    *,
    seeds: int = SEEDS,
    options: Mapping[str, Any] | None = None,
    per_block: bool = False,
    bar: Bar | None = None,
    progress: Callable[[int], None] = lambda seed: None,
) -> Divergence:
    """Verify a model layer by layer.

    Each layer's results become outputs of the graph, which they mostly are in memory already. Gradients are those of
    parameters: one that flows between layers is stored by no program that a user could look into. A second run looks
    into the first layer whose result is off; there, what was fused may be so no longer."""
    bar = bar or Bar()
    blocks = {name: m for name, m in subject.model.named_modules() if m in set(blocks_of(subject.model))}
    order = calls_in_order(subject.model, subject.batch)

    def found(modules: Mapping[str, nn.Module]) -> tuple[Placed, ...]:
        with watched(subject.model, modules) as around:
            errors = errors_of(subject, seeds, options, per_block=per_block, progress=progress, around=around)
        return _in_order(judged(errors, bar), order, list(blocks))

    result = Divergence(subject.title, seeds, bar, found(blocks), notes=subject.notes)
    first = result.first
    if first is None or first.tensor.kind != ACTIVATION:
        return result
    leaves = {n: m for n, m in blocks[first.layer].named_modules(prefix=first.layer) if not any(m.children())}
    inside = [p for p in found(leaves) if p.tensor.kind == ACTIVATION]
    return replace(result, inside=tuple(inside))


def calls_in_order(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """The names of all modules that a forward of the model calls, in the order of their first calls."""
    found: dict[str, None] = {}
    handles = [
        m.register_forward_pre_hook(lambda module, args, name=name: found.setdefault(name))
        for name, m in model.named_modules()
    ]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


class Watched(nn.Module):
    """A model that returns what was ``seen`` of its modules, too. Its parameters are called as the model's."""

    def __init__(self, model: nn.Module, seen: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.model, self.seen = model, seen

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.model.named_parameters(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the model returns, and what the modules gave, by their names."""
        self.seen.clear()
        output = self.model(*args, **kwargs)
        found: dict[str, Tensor] = {}
        for name, result in self.seen:
            for i, x in enumerate(pytree.tree_leaves(result)):
                if isinstance(x, Tensor) and x.is_floating_point():
                    place = f"{name}[{i}]" if i else name
                    again = sum(n == place or n.startswith(f"{place} #") for n in found)
                    found[f"{place} #{again + 1}" if again else place] = x.detach()
        return {ACTIVATION: found, OUTPUT: output}


@contextmanager
def watched(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[Watched]:
    """The model, its results and those of some of its modules together."""
    seen: list[tuple[str, Any]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, result: seen.append((name, result))

    handles = [m.register_forward_hook(note(name)) for name, m in modules.items()]
    try:
        # else Dynamo takes a module for the same one whatever hooks it has
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            yield Watched(model, seen)
    finally:
        for handle in handles:
            handle.remove()


def _in_order(tensors: Iterable[Compared], order: Sequence[str], blocks: Sequence[str]) -> tuple[Placed, ...]:
    """Tensors as they come to be: what modules give, what the model returns, then gradients, last module first."""
    activations, outputs, gradients = [], [], []
    for t in tensors:
        kind, _, name = t.name.partition(".")
        if t.kind == "gradient":
            owner = _owner(t.name, order)
            at = order.index(owner) if owner in order else -1  # an input's comes last
            gradients.append((-at, Placed(_layer(owner, blocks) or t.name, t)))
        elif kind == ACTIVATION:
            activations.append(Placed(_layer(name, blocks) or name, replace(t, name=name, kind=ACTIVATION)))
        else:
            outputs.append(Placed("the model", replace(t, name=name or OUTPUT)))
    later = [p for _, p in sorted(gradients, key=lambda pair: pair[0])]
    return (*activations, *outputs, *later)


def _owner(parameter: str, order: Sequence[str]) -> str:
    """The innermost module among those called that a parameter belongs to."""
    owner = parameter.partition(" [")[0].rpartition(".")[0]
    while owner and owner not in order:
        owner = owner.rpartition(".")[0]
    return owner


def _layer(name: str, blocks: Sequence[str]) -> str:
    """The block that a module is in, or else the module itself."""
    return next((b for b in blocks if f"{name}.".startswith(f"{b}.")), name)


def _worst(tensors: Iterable[Placed]) -> list[tuple[str, Placed]]:
    """For each direction and layer the first tensor past the bar, else that of the largest ratio."""
    found: dict[tuple[str, str], Placed] = {}
    for p in tensors:
        key = ("backward" if p.tensor.kind == "gradient" else "forward", p.layer)
        old = found.setdefault(key, p)
        if not old.tensor.problem and (p.tensor.problem or p.tensor.pooled.ratio > old.tensor.pooled.ratio):
            found[key] = p
    return [(direction, p) for (direction, _), p in found.items()]
