"""``codetta bench``: times of programs, layers and whole models next to those of bare GEMMs and of others."""

from __future__ import annotations

import json as text
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from codetta.backends.hopper.support import why_not
from codetta.bench.kernels import ROUNDS, Settings, kernels
from codetta.bench.launch import CALLS, TOKENS, launch
from codetta.bench.layer import layer
from codetta.bench.loss import loss
from codetta.bench.model import STEPS, Chosen, model
from codetta.bench.model_cases import CASES, DEFAULT_CASE
from codetta.bench.model_rows import ModelReport
from codetta.bench.paper import paper
from codetta.bench.plots import draw, draw_one, draw_shares
from codetta.bench.report import Report
from codetta.bench.shapes import LLAMA, PAPER, SHAPES, Shape, chosen
from codetta.cli.options import Json, errors, show
from codetta.errors import SettingsError, UnsupportedError
from codetta.partition.cut import MEMORY
from codetta.timing import gemm_filler

DEFAULT = {"kernels": ("8b",), "layer": LLAMA, "launch": LLAMA, "loss": LLAMA, "model": (), "paper": PAPER}
WITHOUT_FILLER = ("launch", "model")
CHARTS = "chart"

What = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(DEFAULT)}: a level to measure; {CHARTS}: draw the PNGs of a JSON file that a level or "
        "benchmarks/errors.py wrote."
    ),
]
File = Annotated[Path | None, typer.Argument(help=f"The JSON file for {CHARTS}.")]
Shapes = Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SHAPES)}; commas or several times.")]
Count = Annotated[int | None, typer.Option(min=1, help="Tokens, instead of the shape's own number.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds at most; long cases get fewer, but five at least.")]
Only = Annotated[list[str] | None, typer.Option(help="Cases with this text in their name; may be repeated.")]
Variants = Annotated[
    list[str] | None,
    typer.Option(help="Besides ours and the base, variants whose name begins so; of whole models just those named."),
]
Budget = Annotated[float | None, typer.Option(help="Seconds after which no case is begun.")]
Keep = Annotated[str, typer.Option(help=f"What plans of single kernels and of whole models keep: {', '.join(MEMORY)}.")]
Calls = Annotated[int, typer.Option(min=1, help="Calls of the launch level.")]
Cases = Annotated[
    list[str] | None, typer.Option("--case", help=f"Whole models, of {', '.join(CASES)}; commas or several times.")
]
Steps = Annotated[int, typer.Option(min=1, help="Timed steps of a whole model in a round.")]
Cold = Annotated[
    bool,
    typer.Option("--cold", help="Whole models' first steps one at a time, with empty caches and with full ones."),
]
Tuned = Annotated[bool, typer.Option("--tuned-quack", help="Let QuACK try its tiles: tens of seconds a case.")]
Out = Annotated[
    Path | None, typer.Option(help="A folder for JSON, written after every case, and PNG bars; with chart also a .png.")
]


def bench(  # noqa: PLR0913, PLR0917 - a parameter an option
    what: What,
    file: File = None,
    shapes: Shapes = None,
    tokens: Count = None,
    rounds: Rounds = ROUNDS,
    only: Only = None,
    variants: Variants = None,
    budget: Budget = None,
    memory: Keep = "balanced",
    calls: Calls = CALLS,
    case: Cases = None,
    steps: Steps = STEPS,
    cold: Cold = False,
    tuned_quack: Tuned = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Exit with 1 if something of ours was wrong or was not measured."""
    if what == CHARTS:
        _chart(file, out or Path("."), [v.strip() for given in variants or () for v in given.split(",")])
        return
    if what not in DEFAULT:
        raise SettingsError(f"nothing called {what!r} to measure", hint=f"there is: {', '.join(DEFAULT)}, {CHARTS}")
    if memory not in MEMORY:
        raise SettingsError(f"memory={memory!r}", hint=f"one of {', '.join(MEMORY)}")
    on_gpu = torch.cuda.is_available()
    names = [n for given in shapes or DEFAULT[what] for n in given.split(",")]
    found = chosen(names, tokens or (TOKENS if what == "launch" else None))
    options = {"memory": memory} if memory != "balanced" else {}
    models = Chosen(tuple(n for given in case or [DEFAULT_CASE] for n in given.split(",")), steps, options, cold)
    report = (ModelReport if what == "model" else Report)(what, out, budget)
    with errors.status("") as status:
        settings = Settings(
            rounds=rounds,
            only=tuple(only or ()),
            variants=tuple(variants or ()),
            memory=memory,
            device="cuda" if on_gpu else "cpu",
            tuned=tuned_quack,
            filler=gemm_filler() if on_gpu and what not in WITHOUT_FILLER else None,
            tell=status.update,
        )
        _levels(calls, models)[what](found, settings, report)
    show(report, as_json=json)
    if out is not None and report.rows:
        try:
            draw(report.to_json(), out)
        except UnsupportedError as error:
            errors.print(f"no charts: {error}")
    if not report.ok:
        raise typer.Exit(1)


def _levels(calls: int, models: Chosen) -> dict[str, Callable[[list[Shape], Settings, Report], None]]:
    backend = "reference" if why_not() else "hopper"
    return {
        "kernels": kernels,
        "layer": layer,
        "loss": loss,
        "launch": lambda shapes, settings, report: launch(shapes, settings, report, calls),
        "model": lambda _, settings, report: model(models, settings, report),
        "paper": lambda shapes, settings, report: paper(shapes, settings, report, backend),
    }


def _chart(file: Path | None, out: Path, variants: list[str]) -> None:
    if file is None or not file.is_file():
        raise SettingsError(f"no file {file}" if file else "no file given", hint=f"codetta bench {CHARTS} FILE")
    found: dict[str, Any] = text.loads(file.read_text(encoding="utf-8"))
    if found.get("level") == "model":
        files = draw_shares(found, out, variants)
    else:
        files = draw_one(found, out) if out.suffix == ".png" else draw(found, out)
    for written in files:
        errors.print(f"{written}")
