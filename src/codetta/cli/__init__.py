"""The command line: ``codetta demo``, ``explain``, ``verify`` and so on. A command is imported when it is called."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import codetta
from codetta.errors import CodettaError

COMMANDS = {
    "new": "Write an epilogue file: a small working program with its plain-PyTorch reference.",
    "check": "Compare an epilogue file's programs with their references, and compile them.",
    "demo": "Train a small Llama on real text twice, eager and codetta, and compare.",
    "explain": "Show what becomes of a model: programs, leftovers with reasons, bytes, time.",
    "show": "Show an epilogue, or a segment of a model, after each pass of the compiler.",
    "verify": "Compare outputs and gradients with float64 and with eager.",
    "tune": "Measure which configuration of each kernel is fastest on this GPU, and keep it.",
    "bench": "Measure programs and layers next to bare GEMMs and others' kernels.",
    "doctor": "Say what this machine can run, with which versions, and why not more.",
}


class _Commands(TyperGroup):
    """Lists commands without importing them, and tells a CodettaError as a message with exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name in COMMANDS else stub, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            told = getattr(error, "inner_exception", error)  # torch.compile wraps what its backend raises
            if not isinstance(told, CodettaError):
                raise
            typer.echo(f"codetta: {told}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The entry point of the command line."""
    app()


def _load(name: str) -> Any:
    single = typer.Typer(add_completion=False)
    single.command(name, help=COMMANDS[name])(getattr(importlib.import_module(f"codetta.cli.{name}"), name))
    return typer.main.get_command(single)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"codetta {codetta.__version__}")
        raise typer.Exit


@app.callback(help="A compiler that rewrites Transformer blocks as GEMM-plus-epilogue programs.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that come before a command."""
