"""``codetta show``: an epilogue, or a segment of a model, after each pass of the compiler."""

from __future__ import annotations

import inspect
import json as text
from pathlib import Path
from typing import Annotated

import typer

from codetta.audit.language_page import language_page
from codetta.audit.models import PRESETS, Request, find
from codetta.audit.page import page
from codetta.audit.passes import Shown
from codetta.audit.show import show_program, show_segment
from codetta.author.bind import DEFAULTS, compiled_form, real_sizes
from codetta.author.file import load
from codetta.cli.options import Batch, Dtype, Json, Layers, Tokens, errors, show_all
from codetta.partition.cut import MEMORY

LANGUAGE = "language"  # no program: the reference of all functions
Subject = Annotated[
    str,
    typer.Argument(
        help=f"FILE.py or FILE.py::NAME with epilogues; or a model: a preset ({', '.join(PRESETS)}), a folder with a "
        "Hugging Face config.json, or module:callable that returns (model, example kwargs)."
    ),
]
Number = Annotated[int | None, typer.Option(help="Which segment of a model, from 0; else the first with most GEMMs.")]
Page = Annotated[
    Path | None, typer.Option("--html", help="Write one HTML page, which needs nothing else, to this file.")
]
Keep = Annotated[str, typer.Option(help=f"What forward keeps for backward: {', '.join(MEMORY)}.")]


def show(  # noqa: PLR0913, PLR0917 - a parameter an option
    subject: Subject,
    segment: Number = None,
    layers: Layers = None,
    tokens: Tokens = None,
    batch: Batch = None,
    dtype: Dtype = None,
    memory: Keep = "balanced",
    html: Page = None,
    json: Json = False,
) -> None:
    """Print every pass, or write them to a page; "language" prints docs/authoring/reference.md."""
    if subject == LANGUAGE:
        print(language_page(), end="")
        return
    with errors.status("compiling"):
        if subject.partition("::")[0].endswith(".py"):
            found = _programs(subject, tokens)
        else:
            model = find(Request(subject, layers, tokens, batch, dtype), weights=False)
            found = [show_segment(model, segment, memory)]
    if html is not None:
        html.write_text(page(found), encoding="utf-8")
        errors.print(f"{html}")
    if json:
        print(text.dumps({"shown": [s.to_json() for s in found]}, indent=2))
    elif html is None:
        show_all(found)


def _programs(place: str, tokens: int | None) -> list[Shown]:
    found = []
    for authored in load(place):
        sizes = real_sizes(authored.program, authored.sizes)
        rows = tokens or sizes["M"]
        written, real = inspect.getsource(authored.epilogue.fn), compiled_form(authored.program, sizes)
        found.append(show_program(written, authored.program, real, rows, DEFAULTS["N"]))
    return found
