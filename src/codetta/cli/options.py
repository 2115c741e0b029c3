"""Options that several commands share, and how results reach the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console

from codetta.audit.models import PRESETS

Model = Annotated[
    str,
    typer.Argument(
        help=f"A preset ({', '.join(PRESETS)}), a folder with a Hugging Face config.json, or module:callable that "
        "returns (model, example kwargs)."
    ),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers, instead of the model's own number.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens of all sequences together.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Sequences.")]
Dtype = Annotated[str | None, typer.Option(help="f32, bf16, f16 or f64.")]
Seed = Annotated[int, typer.Option(help="Seed of random weights and tokens.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

errors = Console(stderr=True)


def show(result: Any, *, as_json: bool) -> None:
    """Print a result: its JSON, or what rich makes of it."""
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        show_all([result])


def show_all(results: Iterable[Any]) -> None:
    """Print results as rich makes them."""
    console = Console()
    # a terminal has the width it has; a file or a pipe gets lines that programs in language form fit on
    wide = Console(width=None if console.is_terminal else 120)
    for result in results:
        wide.print(result, crop=False)
