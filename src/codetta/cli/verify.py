"""``codetta verify``: outputs and gradients against float64 and against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.progress import Progress

from codetta.audit.layers import Divergence, check_layers
from codetta.audit.models import Request, find
from codetta.audit.verify import SEEDS, Verification, check
from codetta.cli.options import Batch, Dtype, Json, Layers, Model, Tokens, errors, show

Seeds = Annotated[int, typer.Option(min=1, help="How many times, each with other random weights and tokens.")]

PerBlock = Annotated[bool, typer.Option("--per-block", help="Compile each layer alone, instead of the whole model.")]
PerLayer = Annotated[
    bool,
    typer.Option(
        "--per-layer",
        help="Look at what each layer gives, too, and tell the first layer and tensor that miss the bar, in the order "
        "of execution: forward, then backward.",
    ),
]


def verify(  # noqa: PLR0913, PLR0917 - a parameter an option
    model: Model,
    layers: Layers = None,
    tokens: Tokens = None,
    batch: Batch = None,
    dtype: Dtype = None,
    seeds: Seeds = SEEDS,
    per_block: PerBlock = False,
    per_layer: PerLayer = False,
    json: Json = False,
) -> None:
    """Exit with 1 if a tensor misses the bar."""
    subject = find(Request(model, layers, tokens, batch, dtype), weights=True)
    verified: Callable[..., Verification | Divergence] = check_layers if per_layer else check
    with Progress(console=errors, transient=True, disable=json) as progress:
        task = progress.add_task("verifying", total=seeds)
        found = verified(subject, seeds=seeds, per_block=per_block, progress=lambda _: progress.advance(task))
    show(found, as_json=json)
    if not found.ok:
        raise typer.Exit(1)
