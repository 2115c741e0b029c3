"""What is tuned for a model, and what came of it as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from torch import nn

from codetta.audit.explain import explain
from codetta.audit.models import PRESETS, Preset, Request, dtype_named, find, random_model, token_batch
from codetta.backends.hopper.tune import Found
from codetta.backends.reference.evaluate import DTYPE_OF
from codetta.errors import SettingsError
from codetta.nn.head_graphs import Head
from codetta.nn.head_run import plans as head_plans
from codetta.partition.cut import MEMORY
from codetta.partition.plan import Plan

LAYERS, TOKENS = 2, 4096  # what is traced: the programs of more layers are the same, those of more tokens too
FORM = "HIDDENxFFNxHEADSxKV_HEADSxHEAD"
LOSS_FORM, LOSS_TOKENS = "loss:HIDDENxVOCABULARY", 8192


def plans_of(name: str, dtype: str) -> list[Plan]:
    """The plans of a model by its name, with each way to keep values: a preset, a configuration, ``module:callable``,
    the sizes of a Llama, or of a loss head alone."""
    if loss := re.fullmatch(r"loss:(\d+)x(\d+)", name):
        hidden, vocabulary = map(int, loss.groups())
        return head_plans(Head(hidden, DTYPE_OF[dtype_named(dtype)]), vocabulary, LOSS_TOKENS)
    if re.fullmatch(r"\d+(x\d+)+", name):
        sizes = preset_of(name)
        model: nn.Module = random_model(sizes.config(LAYERS), dtype_named(dtype), 0, "meta")
        batch = token_batch(sizes.vocabulary, (1, TOKENS), 0, "meta")
    else:
        subject = find(Request(name, LAYERS, TOKENS, 1, dtype), weights=False)
        model, batch = subject.model, subject.batch
    found = [explain(model, title=name, options={"memory": memory}, **batch) for memory in MEMORY]
    return [plan for explained in found for pair in explained.plans.values() for plan in pair]


def preset_of(text: str) -> Preset:
    """A Llama of these sizes."""
    numbers = list(map(int, text.split("x")))
    if len(numbers) != 5:
        raise SettingsError(f"{text!r} names no sizes", hint=f"{FORM}, as in 4096x14336x32x8x128")
    hidden, ffn, heads, kv_heads, head = numbers
    like = PRESETS["llama3-8b"]
    return replace(like, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head=head)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What ``codetta tune`` found: winners, where they are kept, kernels that were dropped as wrong, and seconds."""

    gpu: str
    found: Sequence[Found]
    files: Sequence[Path]
    wrong: Sequence[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        lines = [
            {
                "name": f.case.program.name,
                "program": f.case.key.program,
                "n": f.case.key.n,
                "k": f.case.key.k,
                "tokens": f.case.tokens,
                "default": str(f.case.default or "library"),
                "winner": str(f.winner or "library"),
                "us": _number(f.us),
                "default_us": _number(f.default_us),
                "library_us": _number(f.library_us),
                "tried": [{"config": str(config), "us": _number(us)} for config, us in f.tried],
            }
            for f in self.found
        ]
        files = [str(file) for file in self.files]
        return {"gpu": self.gpu, "programs": lines, "files": files, "wrong": list(self.wrong), "seconds": self.seconds}

    def __rich__(self) -> RenderableType:
        grid = Grid("program", "N", "K", "tokens", "default", "winner", "of", "µs", "before", "over library", box=None)
        for f in sorted(self.found, key=lambda f: (-f.case.tokens, f.case.key.n, f.case.key.k)):
            ratio = f.us / f.library_us
            color = "green" if ratio <= 1 else "yellow" if ratio <= 1.08 else "red"
            sizes = [str(v) for v in (f.case.key.n, f.case.key.k, f.case.tokens)]
            picks = [*(str(c or "library") for c in (f.case.default, f.winner)), str(len(f.tried))]
            times = [f"{f.us:.0f}", f"{f.default_us:.0f}", f"[{color}]{ratio:.3f}[/{color}]"]
            grid.add_row(f.case.program.name, *sizes, *picks, *times)
        wrong = [f"dropped: {line}" for line in self.wrong]
        kept = [f"kept in {file}" for file in self.files]
        return Group(f"tuned on {self.gpu} in {self.seconds:.0f} s", grid, "", *wrong, *kept)


def _number(us: float) -> float | None:
    """Microseconds; JSON has no NaN for what was not timed."""
    return None if math.isnan(us) else round(us, 1)
