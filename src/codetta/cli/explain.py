"""``codetta explain``: what becomes of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from codetta.audit.explain import explain as explain_model
from codetta.audit.models import Request, find
from codetta.audit.table import models_page
from codetta.cli.options import Batch, Dtype, Json, Layers, Model, Tokens, errors, show
from codetta.partition.cut import MEMORY

FAMILIES = "families"  # no model: the table of them all
Keep = Annotated[str, typer.Option(help=f"What forward keeps for backward: {', '.join(MEMORY)}.")]


def explain(
    model: Model,
    layers: Layers = None,
    tokens: Tokens = None,
    batch: Batch = None,
    dtype: Dtype = None,
    memory: Keep = "balanced",
    json: Json = False,
) -> None:
    """Trace the model and print the explanation; "families" prints docs/models.md."""
    if model == FAMILIES:
        with errors.status("tracing all families"):
            page = models_page()
        print(page, end="")
        return
    with errors.status("tracing"):
        subject = find(Request(model, layers, tokens, batch, dtype), weights=False)
        found = explain_model(subject.model, options={"memory": memory}, title=subject.title, **subject.batch)
    show(replace(found, notes=(*subject.notes, *found.notes)), as_json=json)
