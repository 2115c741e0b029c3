"""A check for people: what differs first, then the backward programs, the kernels and the times as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from codetta.author.compare import Compared
from codetta.author.conditions import WAYS, derived
from codetta.author.kernels import TRAINING, Kernel
from codetta.author.measured import Measured
from codetta.lang.source import program_text

if TYPE_CHECKING:
    from codetta.author.check import Checked

KINDS = {
    "value": "values, float64",
    "stored": "values, as stored",
    "lowered": "the kernel's source",
    "forward": "forward as planned",
    "gradient": "derived gradients",
    "gpu": "values, on the GPU",
}
PHASES = {TRAINING: "in training"}  # the others are short
IN_TRAINING = "in training: the forward where a gradient is asked for, which also stores what only backward needs"
SPILLING = (
    "spills are of the tile, which is chosen for you, not of the program; up to eight cost less than can be measured, "
    "and tuning tries other tiles"
)


def shown(programs: Sequence[Checked]) -> RenderableType:
    """Every program of a file."""
    return Group(*(line for p in programs for line in _program(p)))


def _program(p: Checked) -> Iterator[RenderableType]:
    verdict = "[green]right[/green]" if p.ok else "[red]wrong[/red]"
    sizes = ", ".join(f"{n}={s}" for n, s in p.sizes.items())
    yield f"[bold]{escape(p.name)}[/bold] ({p.role}): {verdict}"
    yield _numbers(p.comparisons)
    for c in p.comparisons:
        if not c.ok:
            yield Text(f"{KINDS[c.kind]}: {c}", style="red")
    if p.ok and p.backward:
        yield Text("\nits derived backward, behind the next GEMM", style="bold")
        text = Syntax("", "python", background_color="default")
        yield from (text.highlight(program_text(b)) for b in p.backward)
    if p.kernels:
        yield Text(f"kernels for sm_90a at {sizes}", style="bold")
        yield _kernels(p.kernels)
        if any(k.phase == TRAINING for k in p.kernels):
            yield Text(IN_TRAINING, style="dim")
        reasons = {(k.program, k.reason): None for k in p.kernels if k.kind in ("split", "failed")}
        yield from (f"{escape(name)}: {escape(reason)}" for name, reason in reasons)
    if p.advice is not None:
        write = p.advice.write.replace("\n", "\n         ")
        yield Text(f"no single kernel: {p.advice.reason}\n  at {p.advice.where}\n  write: {write}", style="yellow")
    if p.times:
        yield _times(p.times)
    yield from (f"skipped: {escape(s.what)} ({escape(s.why)})" for s in p.skipped)
    yield Text(f"{p.name}: {p.conditions}", style="bold")
    if told := derived(p.kernels):
        yield Text(f"derived from it: {told}")
    if any(k.spills for k in p.kernels):
        yield Text(SPILLING, style="dim")
    yield ""


def _numbers(found: Sequence[Compared]) -> Table:
    table = _table("compared with the reference", "tensors", "largest error", "allowed", "")
    for kind, name in KINDS.items():
        own = [c for c in found if c.kind == kind]
        if own:
            worst = max(own, key=lambda c: c.worst.error / c.limit)
            wrong = sum(not c.ok for c in own)
            told = f"[red]{wrong} wrong[/red]" if wrong else "[green]right[/green]"
            table.add_row(name, str(len(own)), f"{worst.worst.error:.1e}", f"{worst.limit:.0e}", told)
    return table


def _kernels(found: Sequence[Kernel]) -> Table:
    """One row a step: how it runs and, where it is our kernel, its tile and what its code uses."""
    columns = ("phase", "as", "regs", "spills", "KiB", "stages", "least µs", "limited by")
    table = _table("program", *columns)
    for column in table.columns[1:]:
        column.no_wrap = True  # narrow as they are, they fit beside a long name
    for k in found:
        least = f"{max(k.arithmetic_us, k.memory_us):.0f}"
        table.add_row(escape(k.program), PHASES.get(k.phase, k.phase), *_of_kernel(k, least))
    return table


def _of_kernel(k: Kernel, least: str) -> tuple[str, ...]:
    """The cells of a row behind its phase."""
    if k.kind != "kernel":
        style = "red" if k.kind == "failed" else "dim"
        limited = "a second pass" if k.kind == "split" else ""
        return f"[{style}]{WAYS[k.kind]}[/{style}]", "", "", "", "", least, limited
    counts = f"{k.spill_stores}+{k.spill_loads}"
    red = f"[red]{counts}[/red]" if k.spills else "0"
    shared = f"{k.shared_bytes / 1024:.0f}" if k.shared_bytes else "?"
    stages = str(k.stages) if k.stages else "?"
    return f"{WAYS[k.kind]} {k.config}", str(k.registers), red, shared, stages, least, k.limited_by


def _times(found: Sequence[Measured]) -> Table:
    table = _table("program", "phase", "µs", "base", "its µs", "ratio", "torch.compile", "limited by")
    for m in found:
        numbers = [f"{x:.1f}" if x is not None else "" for x in (m.us, m.base_us, m.compile_us)]
        ratio = f"{m.ratio:.3f}" if m.ratio is not None else ""
        told = "; ".join(filter(None, (m.limited_by, m.note)))
        table.add_row(escape(m.program), m.phase, numbers[0], m.base, numbers[1], ratio, numbers[2], escape(told))
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table
