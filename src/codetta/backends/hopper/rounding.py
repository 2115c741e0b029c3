"""GEMMs of the library with one rounding: a process-wide switch of PyTorch's, set while a plan runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def once() -> Iterator[None]:
    """The library may split a long inner dimension and, by PyTorch's default, round the parts' sums to 16 bits: ten
    times the error of one rounding. Not here. The switch is the process's; other threads lose nothing but that."""
    matmuls = torch.backends.cuda.matmul
    before = {name: (getattr(matmuls, name), getattr(matmuls, f"{name}_split_k", None)) for name in REDUCED}
    changed = {name: found for name, found in before.items() if found[0]}
    try:
        for name, (_, split) in changed.items():
            setattr(matmuls, name, False if split is None else (False, split))
        yield
    finally:
        for name, (reduced, split) in changed.items():
            setattr(matmuls, name, reduced if split is None else (reduced, split))
