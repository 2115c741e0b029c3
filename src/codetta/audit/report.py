"""An explanation for people: a summary, the programs layer by layer, what is left over and what stays outside."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from codetta.audit.parts import WAYS, Half, Opaque, Part, groups
from codetta.partition.lifetime import Peak
from codetta.partition.plan import Plan, plan_text

COLUMN = {"programs": "programs", "boundary_fusion": "fusion between GEMMs", "eager": "eager operators"}


def summary(forward: Half, backward: Half) -> RenderableType:
    """Counts, bytes and times as tables."""
    counts = _table("", "forward", "backward")
    rows = [
        ("GEMMs", forward.gemms, backward.gemms),
        ("  with an epilogue", forward.epilogues, backward.epilogues),
        ("  of them data gradients", "", backward.data_gradient_epilogues),
        ("finalizes", forward.finalizes, backward.finalizes),
        ("leftovers", forward.leftovers, backward.leftovers),
        ("opaque calls", forward.opaque, backward.opaque),
    ]
    if forward.prepares or backward.prepares:
        rows.append(("prepared weights", forward.prepares, backward.prepares))
    for name, a, b in rows:
        counts.add_row(name, str(a), str(b))
    counts.add_row("FLOPs of GEMMs", f"{forward.flops:.3g}", f"{backward.flops:.3g}")
    costs = _table("activations moved, least time", *COLUMN.values())
    for name, half in (("forward", forward), ("backward", backward)):
        moved = (half.bytes, half.bytes_boundary_fusion, half.bytes_eager)
        costs.add_row(name, *(gigabytes(b) for b in moved))
    for machine in forward.seconds:
        both = [forward.seconds[machine], backward.seconds.get(machine, {})]
        costs.add_row(f"both on {machine}", *(_time(sum(h.get(way, 0.0) for h in both)) for way in WAYS))
    return Group(counts, "", costs, f"besides: {gigabytes(backward.weight_gradient_bytes)} of weight gradients")


def programs(parts: Sequence[Part], plans: Mapping[str, tuple[Plan, Plan]]) -> Iterator[RenderableType]:
    """The programs in language form, equal segments once."""
    python = Syntax("", "python", background_color="default")
    for key, where in groups(parts).items():
        first = parts[where[0]]
        yield Text(_heading(parts, where), style="bold", no_wrap=True, overflow="ignore")
        if first.note:
            yield Text(first.note)
        if first.memory.bytes:
            yield Text(f"peak bytes: {_peak(first.memory)}")
        for name, plan in zip(("forward", "backward"), plans[key], strict=True):
            if plan.steps:
                yield Text(f"--- {name}", style="bold")
                text = python.highlight(plan_text(plan))
                text.overflow = "ignore"  # a line of source stays one line
                yield text
        if not first.forward.gemms:
            yield Text("no GEMM")


def leftovers(parts: Sequence[Part]) -> RenderableType:
    """Every leftover with its reason."""
    table = _table("leftovers", "in", "reason")
    for where in groups(parts).values():
        first = parts[where[0]]
        for name, half in (("forward", first.forward), ("backward", first.backward)):
            for reason in half.leftover_reasons:
                table.add_row(str(len(where)), Text(f"{name}, segment {_ranges(where)}"), Text(reason))
    return table if table.row_count else Text("no leftovers")


def outside(opaque: Iterable[Opaque]) -> RenderableType:
    """Every opaque call with its reason."""
    names: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for o in opaque:
        names.setdefault(o.reason, []).append(o.name if o.count == 1 else f"{o.name} x{o.count}")
        counts[o.reason] = counts.get(o.reason, 0) + o.count
    table = _table("opaque calls", "reason", "operators")
    for reason, calls in names.items():
        table.add_row(str(counts[reason]), Text(reason or "PyTorch's"), Text(", ".join(calls)))
    return table


def gigabytes(size: int) -> str:
    """A number of bytes with three digits and a unit."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name in ("in", "reason", "operators") else "right")
    return table


def _heading(parts: Sequence[Part], where: Sequence[int]) -> str:
    first, last = parts[where[0]], parts[where[-1]]
    title = f"=== segment {where[0]}: {_between(first.layers)}, M = {first.rows:,}"
    if len(where) > 1:
        title += f"; segments {_ranges(where[1:])}, to {_between(last.layers)}, are alike"
    return title


def _peak(memory: Peak) -> str:
    """The most memory at once, and what of it lies between forward and backward."""
    between = f", of them {gigabytes(memory.between)} between forward and backward" if memory.between else ""
    return f"{gigabytes(memory.bytes)} above the inputs{between}"


def _between(layers: Sequence[str]) -> str:
    return " and ".join(layers) or "the model itself"


def _ranges(numbers: Sequence[int]) -> str:
    """``1-3, 7`` for 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def plain_reason(reason: str) -> str:
    """A reason without the names of single operators, so that alike ones are counted together."""
    return re.sub(r"^its input \S+ stays", "its input stays", reason)


def operator(target: str) -> str:
    """``aten.embedding.default`` is ``embedding``, ``<built-in function getitem>`` is ``getitem``."""
    return (
        target.split(".")[1] if target.startswith("aten.") else target.removeprefix("<built-in function ").rstrip(">")
    )
