"""``codetta tune``: measure which configuration of each kernel is fastest on this GPU, and keep the winners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from codetta.audit.models import PRESETS, dtype_named
from codetta.audit.tuning import FORM, LOSS_FORM, Tuning, plans_of
from codetta.author.file import load
from codetta.author.kernels import gemms_of
from codetta.backends import get_bench
from codetta.backends.hopper.choose import forget
from codetta.backends.hopper.config import BUCKETS
from codetta.backends.hopper.table import merged, read, tables, this_gpu, user_file, write
from codetta.backends.hopper.tune import Case, Found, cases_of, cases_of_programs
from codetta.backends.hopper.tune import tune as search
from codetta.backends.reference.evaluate import DTYPE_OF
from codetta.cli.options import Json, errors, show
from codetta.errors import SettingsError

VOCABULARY = 65_536  # sizes from which a GEMM is an LM head's

MODELS = (
    f"Models, tuned as one: presets ({', '.join(PRESETS)}), folders, module:callable, the sizes of a Llama, {FORM}, "
    f"or of a loss head, {LOSS_FORM}; or FILE.py and FILE.py::NAME with epilogues, at their own sizes."
)

Models = Annotated[list[str], typer.Argument(help=MODELS)]
Rows = Annotated[list[int] | None, typer.Option(min=1, help="Tokens to tune for; may be repeated. Else one a bucket.")]
Kind = Annotated[str, typer.Option(help="bf16 or f16.")]
Budget = Annotated[float, typer.Option(min=10, help="Seconds that it may take.")]
Head = Annotated[bool, typer.Option("--head", help="Tune the LM head's GEMMs instead (loss:... without its logits).")]
Missing = Annotated[bool, typer.Option("--missing", help="Only what no table has an entry for, at these very sizes.")]
Derived = Annotated[bool, typer.Option("--derived", help="Of an epilogue also what training makes of it.")]
Out = Annotated[Path | None, typer.Option(help="A file that the entries are written to besides the user's table.")]


def tune(  # noqa: PLR0913, PLR0917 - a parameter an option
    models: Models,
    tokens: Rows = None,
    dtype: Kind = "bf16",
    budget: Budget = 240.0,
    head: Head = False,
    missing: Missing = False,
    derived: Derived = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Tune and store; the table that is written serves from then on."""
    begin = perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, disable=json) as bars:
        task = bars.add_task("tracing", total=None)
        files = [name for name in models if name.partition("::")[0].endswith(".py")]
        found = [*_of_models([name for name in models if name not in files], tokens, dtype, head)]
        found += [c for name in files for c in _of_file(name, tokens, dtype, derived)]
        known = {key for table in tables() for key in table.entries} if missing else set()
        cases = list({c.key: c for c in found if c.key not in known}.values())
        if not cases:
            hint = "the tables have all of them" if missing else "no such program lowers to one kernel"
            raise SettingsError("nothing to tune", hint=hint)

        def progress(what: str, done: int, of: int) -> None:
            bars.update(task, description=what, completed=done, total=of)

        bench = get_bench(progress)
        kept = [user_file(this_gpu()), *([out] if out is not None else [])]
        winners = search(cases, bench, budget=budget - (perf_counter() - begin), keep=lambda known: _keep(known, kept))
    forget()
    show(Tuning(this_gpu(), winners, kept, bench.wrong, perf_counter() - begin), as_json=json)


def _of_models(names: list[str], tokens: list[int] | None, dtype: str, head: bool) -> list[Case]:
    found = cases_of([p for name in names for p in plans_of(name, dtype)], tokens or BUCKETS[::-1])
    every = all(name.startswith("loss:") for name in names)
    return [c for c in found if every or head == (max(c.key.n, c.key.k) >= VOCABULARY)]


def _of_file(place: str, tokens: list[int] | None, dtype: str, derived: bool) -> Iterator[Case]:
    for authored in load(place):
        programs, rows = gemms_of(authored, DTYPE_OF[dtype_named(dtype)], derived=derived)
        yield from cases_of_programs(programs, tokens or [rows])


def _keep(found: list[Found], files: list[Path]) -> None:
    """After every heat, so that what is known survives whatever comes next."""
    entries = {f.case.key: f.entry for f in found if f.us > 0}  # not of programs that nothing was timed for
    for file in files:
        write(merged(read(file) if file.is_file() else None, this_gpu(), entries), file)
