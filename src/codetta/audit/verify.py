"""Whether a compiled model is right: every output and gradient against float64, next to eager's in the same dtype."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from codetta.audit.models import Subject, as_batch
from codetta.audit.runs import Step, compiled_step, eager_step, float64_step, many_compilations
from codetta.errors import VerifyError
from codetta.testing import Bar, Errors, mean_ratio, pooled, relative_error

SEEDS = 5
COLUMNS = ("tensor", "dtype", "ours", "eager", "ours/eager", "")


@dataclass(frozen=True, slots=True)
class Compared:
    """One tensor, or a part of one: its errors, a pair a seed, and why it misses the bar, if it does."""

    name: str
    kind: str
    errors: tuple[Errors, ...]
    problem: str = ""

    @property
    def pooled(self) -> Errors:
        """The errors of all seeds as one."""
        return pooled(self.errors)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        e = self.pooled
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": str(e.dtype).removeprefix("torch."),
            "ours": e.ours,
            "eager": e.eager,
            "ratio": e.ratio,
            "seeds": [{"ours": s.ours, "eager": s.eager} for s in self.errors],
            "ok": not self.problem,
            "problem": self.problem,
        }

    def cells(self) -> tuple[str, ...]:
        """As cells of a table: name, dtype, both errors, their ratio, and whether it misses the bar."""
        e = self.pooled
        dtype = str(e.dtype).removeprefix("torch.")
        state = "[red]misses the bar[/red]" if self.problem else ""
        return (escape(self.name), dtype, f"{e.ours:.2e}", f"{e.eager:.2e}", f"{e.ratio:.3f}", state)


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``codetta.verify`` found. ``problems`` is empty if the bar is cleared."""

    title: str
    seeds: int
    bar: Bar
    tensors: tuple[Compared, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything clears the bar."""
        return not self.problems

    @property
    def ratio(self) -> float:
        """The geometric mean of ours over eager's, over all tensors but scalars."""
        return mean_ratio(t.pooled for t in self.tensors)

    @property
    def ratio_limit(self) -> float:
        """The largest geometric mean that is allowed."""
        return self.bar.mean_limit(t.pooled for t in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "ok": self.ok,
            "model": self.title,
            "seeds": self.seeds,
            "bar": {
                "factor": self.bar.factor,
                "units": self.bar.units,
                "mean": self.bar.mean,
                "scalar_factor": self.bar.scalar_factor,
            },
            "geometric_mean": self.ratio,
            "geometric_mean_allowed": self.ratio_limit,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "tensors": [t.to_json() for t in self.tensors],
        }

    def __rich__(self) -> RenderableType:
        table = Table(*COLUMNS, box=None, pad_edge=False, title=self.title, title_justify="left")
        for t in self.tensors:
            table.add_row(*t.cells())
        mean = f"geometric mean of ours/eager over all tensors: {self.ratio:.3f}, allowed {self.ratio_limit:.3f}"
        verdict = ["[green]passes[/green]"] if self.ok else [f"[red]{escape(p)}[/red]" for p in self.problems]
        return Group(table, "", rule_text(self.bar, self.seeds), mean, *self.notes, *verdict)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120)
        with console.capture() as text:
            console.print(self)
        return text.get()


def verify(
    model: nn.Module,
    example_batch: Mapping[str, Any] | Tensor,
    *,
    seeds: int = SEEDS,
    options: Mapping[str, Any] | None = None,
    per_block: bool = False,
    raises: bool = False,
) -> Verification:
    """Compare ``torch.compile(model, backend="codetta")`` with float64 and with eager; ``raises`` a VerifyError.

    The model is called with the batch (keyword arguments, or one tensor) and differentiated: its loss if it returns
    one, else all its outputs against random cotangents; with ``per_block`` each of its layers is compiled alone. The
    gradients are those of all parameters and inputs that require one. The first seed takes the batch as it is; later
    ones draw floats anew and integers from among the batch's own (masks and positions stay). Neither the model nor its
    gradients change.
    """
    subject = Subject(type(model).__name__, model, as_batch(model, example_batch))
    found = check(subject, seeds=seeds, options=options, per_block=per_block)
    if raises and not found.ok:
        raise VerifyError(found.problems[0], hint=f"{len(found.problems)} of {len(found.tensors)} checks fail")
    return found


def check(
    subject: Subject,
    *,
    seeds: int = SEEDS,
    options: Mapping[str, Any] | None = None,
    per_block: bool = False,
    bar: Bar | None = None,
    progress: Callable[[int], None] = lambda seed: None,
) -> Verification:
    """Verify a model that may be given other weights for each seed, as one graph or ``per_block``;
    ``progress`` is told when a seed is done."""
    return _judge(
        subject, errors_of(subject, seeds, options, per_block=per_block, progress=progress), seeds, bar or Bar()
    )


def errors_of(
    subject: Subject,
    seeds: int,
    options: Mapping[str, Any] | None,
    *,
    per_block: bool,
    progress: Callable[[int], None],
    around: nn.Module | None = None,
) -> dict[tuple[str, str], list[Errors]]:
    """The errors of all seeds, by the kind and the name of the tensor; ``around`` is called in the model's place, and
    has its parameters."""
    called = around or subject.model
    errors: dict[tuple[str, str], list[Errors]] = {}
    with many_compilations():
        ours, oracle = compiled_step(called, options, per_block=per_block), float64_step(called)
        for seed in range(seeds):
            batch = subject.renew(seed) if subject.renew else varied(subject.batch, seed)
            eager = eager_step(called, batch, seed)
            for kind, name, pair in _compare(subject.model, batch, ours(batch, seed), eager, oracle(batch, seed)):
                errors.setdefault((kind, name), []).append(pair)
            progress(seed)
    return errors


def varied(batch: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Another batch like this one: floats drawn anew, integers from among the batch's own, masks and positions kept.
    Seed 0 is the batch itself."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for name, x in batch.items():
        found[name] = x
        if not isinstance(x, Tensor) or seed == 0 or x.dtype is torch.bool or "mask" in name or "position" in name:
            continue
        if x.is_floating_point():
            spread = x.detach().float().std(correction=0).item() or 1.0
            noise = torch.randn(x.shape, generator=generator) * spread
            found[name] = noise.to(x.device, x.dtype).requires_grad_(x.requires_grad)
        elif x.numel():
            chosen = torch.randint(x.numel(), x.shape, generator=generator)
            found[name] = x.flatten()[chosen.to(x.device)]
    return found


def _compare(
    model: nn.Module, batch: Mapping[str, Any], ours: Step, eager: Step, oracle: Step
) -> Iterator[tuple[str, str, Errors]]:
    """Every pair of errors, with the kind and the name of the tensor."""
    for name, x in eager.outputs.items():
        yield "output", name, _errors(ours.outputs.get(name), x, oracle.outputs[name])
    rows = _target_rows(model, batch)
    for name, eagers in eager.gradients.items():
        given = (ours.gradients[name], eagers, oracle.gradients[name])
        like = next((g for g in (eagers, *given) if g is not None), None)
        if like is None:  # nobody's gradient reaches it
            continue
        three = [g if g is not None else torch.zeros_like(like) for g in given]
        if name not in rows:
            yield "gradient", name, _errors(*three)
            continue
        hit = torch.zeros(like.shape[0], dtype=torch.bool, device=like.device)
        hit[rows[name]] = True
        for part, where in (("target rows", hit), ("other rows", ~hit)):
            if bool(where.any()):
                yield "gradient", f"{name} [{part}]", _errors(*(g[where] for g in three))


def _errors(ours: Tensor | None, eager: Tensor, reference: Tensor) -> Errors:
    right = ours is not None and ours.shape == eager.shape and ours.dtype == eager.dtype
    mine = relative_error(ours, reference) if ours is not None and right else float("inf")
    return Errors(mine, relative_error(eager, reference), eager.dtype, is_scalar=eager.numel() == 1)


def _target_rows(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """For the LM head's weight, the rows that are some token's target: their gradient has another size and source."""
    labels = next((batch[n] for n in ("shift_labels", "labels") if isinstance(batch.get(n), Tensor)), None)
    head: Any = getattr(model, "get_output_embeddings", None)
    weight = getattr(head(), "weight", None) if callable(head) else None
    if not isinstance(labels, Tensor) or not isinstance(weight, Tensor) or labels.is_floating_point():
        return {}
    shifted = labels[:, 1:] if labels.dim() == 2 and "shift_labels" not in batch else labels
    targets = shifted.unique()
    targets = targets[(targets >= 0) & (targets < weight.shape[0])]
    return {name: targets for name, p in model.named_parameters() if p is weight}


def rule_text(bar: Bar, seeds: int) -> str:
    """What is compared, and what is allowed, in a sentence."""
    return (
        f"relative error against float64, geometric mean of {seeds} seeds; allowed: {bar.factor:.2f} x "
        f"eager's + {bar.units} units in the last place (a scalar: {bar.scalar_factor} x)"
    )


def judged(errors: Mapping[tuple[str, str], Sequence[Errors]], bar: Bar) -> list[Compared]:
    """Each tensor's errors, held against the bar."""
    return [Compared(n, kind, tuple(es), bar.why_not(pooled(es)) or "") for (kind, n), es in errors.items()]


def _judge(subject: Subject, errors: dict[tuple[str, str], list[Errors]], seeds: int, bar: Bar) -> Verification:
    tensors = judged(errors, bar)
    problems = [f"{t.kind} {t.name}: {t.problem}" for t in tensors if t.problem]
    together = bar.why_not_all(t.pooled for t in tensors)
    ones = [n for n, p in subject.model.named_parameters() if p.dim() == 1 and bool((p == 1).all())]
    note = (
        f"{len(ones)} vectors of parameters are all ones ({ones[0]}, ...): a gain left out would not show"
        if ones
        else ""
    )
    return Verification(
        subject.title,
        seeds,
        bar,
        tuple(tensors),
        (*problems, *([together] if together else [])),
        (*subject.notes, *([note] if note else [])),
    )
