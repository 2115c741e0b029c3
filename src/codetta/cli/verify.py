"""``codetta verify``: outputs and gradients against float64 and against eager."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import Progress

from codetta.audit.models import Request, find
from codetta.audit.verify import SEEDS, check
from codetta.cli.options import Batch, Dtype, Json, Layers, Model, Tokens, errors, show

Seeds = Annotated[int, typer.Option(min=1, help="How many times, each with other random weights and tokens.")]


def verify(
    model: Model,
    layers: Layers = None,
    tokens: Tokens = None,
    batch: Batch = None,
    dtype: Dtype = None,
    seeds: Seeds = SEEDS,
    json: Json = False,
) -> None:
    """Exit with 1 if a tensor misses the bar."""
    subject = find(Request(model, layers, tokens, batch, dtype), weights=True)
    with Progress(console=errors, transient=True, disable=json) as progress:
        task = progress.add_task("verifying", total=seeds)
        found = check(subject, seeds=seeds, progress=lambda _: progress.advance(task))
    show(found, as_json=json)
    if not found.ok:
        raise typer.Exit(1)
