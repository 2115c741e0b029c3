"""``codetta new``: a small working epilogue file to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from codetta.author.template import write_new
from codetta.cli.options import Json, errors

Name = Annotated[str, typer.Argument(help="The program's name: a Python name.")]
Folder = Annotated[Path, typer.Option(help="Where to write it.")]


def new(name: Name, folder: Folder = Path("."), json: Json = False) -> None:
    """Write NAME.py; a file that exists is left alone."""
    file = write_new(name, folder)
    if json:
        typer.echo(f'{{"file": "{file.as_posix()}"}}')
    else:
        typer.echo(file)
        errors.print(f"codetta check {file}")
