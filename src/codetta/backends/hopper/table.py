"""Tables of configurations that were measured: one shipped with the package, one that the user's tuning writes.

An entry is found by what a program does to memory, by its sizes and by the number of rows; names do not matter, and
neither does how the epilogue's source is spelled."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from codetta import settings
from codetta.backends.hopper.config import Config, bucket, fits
from codetta.backends.hopper.lowered import Lowered
from codetta.errors import SettingsError
from codetta.ir.program import Program

SHIPPED = Path(__file__).parent / "tables"
ASSUMED = "NVIDIA H200"  # what is compiled for where there is no GPU
NEAR = 2.5  # powers of two by which an entry's sizes may differ, all together, from those asked for
VERSION = 1


@dataclass(frozen=True, slots=True)
class Key:
    """What a configuration was measured for: the program as text, its columns, its other size that does not depend on
    the tokens (the inner one; a weight gradient's rows), and the bucket of the number of tokens."""

    program: str
    n: int
    k: int
    rows: int


@dataclass(frozen=True, slots=True)
class Entry:
    """The winner (None: the library's GEMM, which is possible where there is no epilogue), its time in microseconds,
    the time of the library's bare GEMM beside it, and the name of a program that it was measured for."""

    config: Config | None
    us: float = 0.0
    library_us: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Entries measured on one kind of GPU, and the file that they are in."""

    gpu: str
    entries: Mapping[Key, Entry] = field(hash=False)
    path: Path | None = None


# --- keys -------------------------------------------------------------------------------------------------------------


def key_of(program: Program, lowered: Lowered, rows: int | None) -> Key:
    """The key of a program at a number of tokens."""
    gemm, acc = program.gemm, program.params[0].type
    other = acc.rows if gemm is not None and gemm.form == "tn" else gemm.k if gemm is not None else 0
    form, dtype = (gemm.form, str(gemm.dtype)) if gemm is not None else ("", "")
    return Key(described(lowered, form, dtype), lowered.cols, other if isinstance(other, int) else 0, bucket(rows))


def described(lowered: Lowered, form: str, dtype: str) -> str:
    """What a kernel loads, computes and stores, as text: its cost hangs on little else."""
    heads = f" of {lowered.half}" if lowered.mode != "pair" and lowered.half else ""
    loads = sorted(f"{o.kind}:{o.dtype}" for o in lowered.operands)
    stores = sorted(f"{s.dtype}" for s in lowered.stores)
    sinks = sorted(s.kind for s in lowered.sinks)
    calls = sorted(set(re.findall(r"\b(\w+)\(", lowered.source)) - {"epilogue"})
    groups = sorted(f"{s.kind}:{s.inside}" for s in lowered.statistics)
    parts: dict[str, Sequence[str]] = {"in groups": groups, "->": stores, "+": sinks, "by": calls}
    texts = [" ".join([sign, *found]) for sign, found in parts.items() if found]
    return " ".join([form, dtype, f"{lowered.mode}{heads}:", *loads, *texts])


# --- looking up -------------------------------------------------------------------------------------------------------


def look_up(key: Key, lowered: Lowered) -> Entry | None:
    """The entry that serves: the user's own before the shipped one, and in each the exact one before a near one."""
    for table in tables():
        entry = table.entries.get(key) or _nearest(table, key)
        if entry is not None and (entry.config is None or fits(lowered, entry.config)):
            return entry
    return None


def _nearest(table: Table, key: Key) -> Entry | None:
    alike = [(distance(key, k), e) for k, e in table.entries.items() if k.program == key.program]
    near = [(d, e) for d, e in alike if d <= NEAR]
    return min(near, key=lambda pair: pair[0])[1] if near else None


def distance(a: Key, b: Key) -> float:
    """How far apart two sizes are, in powers of two."""
    pairs = ((a.n, b.n), (a.k, b.k), (a.rows, b.rows))
    return sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in pairs)


@cache
def tables() -> tuple[Table, ...]:
    """The tables that serve this process, the user's first. ``tables.cache_clear()`` reads them anew."""
    gpu = this_gpu()
    own, shipped = user_file(gpu), [read(file) for file in sorted(SHIPPED.glob("*.json"))]
    best = sorted(shipped, key=lambda t: t.gpu != gpu)[:1]  # any Hopper GPU's is better than none
    return (*([read(own)] if own.is_file() else []), *best)


def this_gpu() -> str:
    """The name of the GPU that is tuned for."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ASSUMED


def user_file(gpu: str) -> Path:
    """Where a user's own entries for a GPU are kept."""
    return settings.cache_dir() / "tables" / (re.sub(r"\W+", "-", gpu.lower()).strip("-") + ".json")


# --- files ------------------------------------------------------------------------------------------------------------


def read(file: Path) -> Table:
    """A table from its file; SettingsError says which file is broken."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}, not {VERSION}")
        entries = dict(_entry(e) for e in found["entries"])
        return Table(str(found["gpu"]), entries, file)
    except (OSError, ValueError, KeyError, TypeError, SettingsError) as error:
        raise SettingsError(f"{file} is no table of configurations: {error}", hint="remove it") from error


def _entry(found: dict[str, Any]) -> tuple[Key, Entry]:
    key = Key(found["program"], found["n"], found["k"], found["rows"])
    config = found["config"] if found["config"] is None else Config.from_json(found["config"])
    return key, Entry(config, found.get("us", 0.0), found.get("library_us", 0.0), found.get("name", ""))


def write(table: Table, file: Path) -> None:
    """Put a table into a file, at once or not at all: a reader never sees half of it."""
    order = sorted(table.entries.items(), key=lambda pair: (pair[0].program, pair[0].n, pair[0].k, pair[0].rows))
    lines = ",\n".join(f"  {json.dumps(line)}" for line in _lines(order))
    head = f'{{"version": {VERSION}, "gpu": {json.dumps(table.gpu)}, "entries": ['
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(f"{head}\n{lines}\n]}}\n", encoding="utf-8")
    beside.replace(file)


def _lines(order: Iterable[tuple[Key, Entry]]) -> Iterator[dict[str, Any]]:
    for key, e in order:
        config = e.config.to_json() if e.config is not None else None
        yield {
            **asdict(key),
            "name": e.name,
            "config": config,
            "us": round(e.us, 1),
            "library_us": round(e.library_us, 1),
        }


def merged(table: Table | None, gpu: str, entries: Mapping[Key, Entry]) -> Table:
    """A table with new entries in the place of older ones."""
    return Table(gpu, {**(table.entries if table is not None else {}), **entries})
