"""``codetta demo``: the same training run, eager and codetta."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from codetta.audit.demo import STEPS
from codetta.audit.demo import demo as run_demo
from codetta.cli.options import Json, errors, show

Steps = Annotated[int, typer.Option(min=1, help="Training steps of each run.")]
Out = Annotated[Path, typer.Option(help="Where the picture goes.")]


def demo(steps: Steps = STEPS, out: Out = Path("out/demo.png"), json: Json = False) -> None:
    """Exit with 1 if the runs do not agree."""
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=errors, disable=json) as bars:

        def progress(name: str, total: int, value: float | None) -> None:
            if value is None:
                tasks[name] = bars.add_task(name, total=total, loss=float("nan"))
            else:
                bars.update(tasks[name], advance=1, loss=value)

        found = run_demo(out, steps=steps, progress=progress)
    show(found, as_json=json)
    if not found.ok:
        raise typer.Exit(1)
