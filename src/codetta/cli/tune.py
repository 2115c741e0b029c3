"""``codetta tune``: measure which configuration of each kernel is fastest on this GPU, and keep the winners."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from codetta.audit.models import PRESETS
from codetta.audit.tuning import FORM, LOSS_FORM, Tuning, plans_of
from codetta.backends import get_bench
from codetta.backends.hopper.choose import forget
from codetta.backends.hopper.config import BUCKETS
from codetta.backends.hopper.table import merged, read, tables, this_gpu, user_file, write
from codetta.backends.hopper.tune import Found, cases_of
from codetta.backends.hopper.tune import tune as search
from codetta.cli.options import Json, errors, show
from codetta.errors import SettingsError

VOCABULARY = 65_536  # sizes from which a GEMM is an LM head's

MODELS = (
    f"Models, tuned as one: presets ({', '.join(PRESETS)}), folders, module:callable, the sizes of a Llama, {FORM}, "
    f"or of a loss head, {LOSS_FORM}."
)

Models = Annotated[list[str], typer.Argument(help=MODELS)]
Rows = Annotated[list[int] | None, typer.Option(min=1, help="Tokens to tune for; may be repeated. Else one a bucket.")]
Kind = Annotated[str, typer.Option(help="bf16 or f16.")]
Budget = Annotated[float, typer.Option(min=10, help="Seconds that it may take.")]
Head = Annotated[bool, typer.Option("--head", help="Tune the LM head's GEMMs instead: they take longest.")]
Missing = Annotated[bool, typer.Option("--missing", help="Only what no table has an entry for, at these very sizes.")]
Out = Annotated[Path | None, typer.Option(help="A file that the entries are written to besides the user's table.")]


def tune(  # noqa: PLR0913, PLR0917 - a parameter an option
    models: Models,
    tokens: Rows = None,
    dtype: Kind = "bf16",
    budget: Budget = 240.0,
    head: Head = False,
    missing: Missing = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Tune and store; the table that is written serves from then on."""
    begin = perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, disable=json) as bars:
        task = bars.add_task("tracing", total=None)
        found = cases_of([p for name in models for p in plans_of(name, dtype)], tokens or BUCKETS[::-1])
        every = all(name.startswith("loss:") for name in models)
        known = {key for table in tables() for key in table.entries} if missing else set()
        cases = [c for c in found if every or head == (max(c.key.n, c.key.k) >= VOCABULARY)]
        cases = [c for c in cases if c.key not in known]
        if not cases:
            hint = "the tables have all of them" if missing else "no such program of the model lowers to one kernel"
            raise SettingsError("nothing to tune", hint=hint)

        def progress(what: str, done: int, of: int) -> None:
            bars.update(task, description=what, completed=done, total=of)

        bench = get_bench(progress)
        files = [user_file(this_gpu()), *([out] if out is not None else [])]
        winners = search(cases, bench, budget=budget - (perf_counter() - begin), keep=lambda known: _keep(known, files))
    forget()
    show(Tuning(this_gpu(), winners, files, bench.wrong, perf_counter() - begin), as_json=json)


def _keep(found: list[Found], files: list[Path]) -> None:
    """After every heat, so that what is known survives whatever comes next."""
    entries = {f.case.key: f.entry for f in found if f.us > 0}  # not of programs that nothing was timed for
    for file in files:
        write(merged(read(file) if file.is_file() else None, this_gpu(), entries), file)
