"""Real text that every machine has: the sources of Python's standard library, a byte a token."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codetta.errors import UnsupportedError

LIMIT, DEEP_LIMIT = 4_000_000, 16_000_000
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HELD_OUT = 0.05


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on, and bytes to judge by."""

    train: Tensor
    held_out: Tensor
    files: int

    def batch(self, seed: int, shape: tuple[int, int]) -> dict[str, Any]:
        """Random windows of the training bytes, as inputs and labels."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.train) - shape[1], (shape[0],), generator=generator)
        return _windows(self.train, starts, shape[1])

    def fresh(self, step: int, shape: tuple[int, int]) -> dict[str, Any]:
        """The step's share of disjoint windows in a fixed random order: no text comes twice before all of it came."""
        windows = len(self.train) // shape[1]
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(0))
        chosen = torch.arange(step * shape[0], (step + 1) * shape[0]) % windows
        return _windows(self.train, order[chosen] * shape[1], shape[1])

    def judge(self, windows: int, length: int) -> dict[str, Any]:
        """The same windows every time, evenly over what was held out."""
        starts = torch.linspace(0, len(self.held_out) - length, windows).long()
        return _windows(self.held_out, starts, length)


def standard_library(*, deep: bool = False) -> Corpus:
    """The top-level modules of the standard library in the order of their names, or with its packages, some 10 MB; the
    last bytes are held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py") if deep else root.glob("*.py"))
    files = [f for f in files if not NOT_LIBRARY & set(f.relative_to(root).parts)]
    text = b"".join(f.read_bytes() for f in files)[: DEEP_LIMIT if deep else LIMIT]
    if len(text) < 100_000:
        raise UnsupportedError(f"no sources of the standard library in {root}", hint="a Python with its .py files")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    split = int(len(data) * (1 - HELD_OUT))
    return Corpus(data[:split], data[split:], len(files))


def _windows(data: Tensor, starts: Tensor, length: int) -> dict[str, Any]:
    ids = torch.stack([data[int(s) : int(s) + length] for s in starts]).long()
    return {"input_ids": ids, "labels": ids}
