"""``codetta check``: an epilogue file against its reference, and what its programs are as kernels."""

from __future__ import annotations

import json as text
from typing import Annotated

import typer

from codetta.author.check import check as run
from codetta.author.check import failure
from codetta.cli.options import Json, errors, show
from codetta.errors import CodettaError

File = Annotated[str, typer.Argument(metavar="FILE[::NAME]", help="An epilogue file, or one program of it.")]
Quick = Annotated[bool, typer.Option("--quick", help="Compare numbers only, at fewer sizes; compile nothing.")]


def check(file: File, quick: Quick = False, json: Json = False) -> None:
    """Exit with 1 if a value or a gradient differs from the reference, with 2 if the file cannot be checked."""
    try:
        with errors.status("") as status:
            found = run(file, quick=quick, tell=status.update)
    except CodettaError as error:
        if json:
            print(text.dumps(failure(file, error), indent=2))
        raise
    show(found, as_json=json)
    if not found.ok:
        raise typer.Exit(1)
