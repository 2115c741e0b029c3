"""``codetta doctor``: what this machine can run, with which versions, and why not more."""

from __future__ import annotations

from codetta.audit.doctor import diagnose
from codetta.cli.options import Json, show


def doctor(json: Json = False) -> None:
    """Print the diagnosis."""
    show(diagnose(), as_json=json)
