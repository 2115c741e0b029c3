"""Two tensors element by element: the largest error, where it is, what was expected there and what was got."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Errors are |got - expected| over |expected| + the root mean square of all that is expected.
EXACT = 1e-9  # float64 against float64: summation orders differ, nothing else may
LEAST = 1e-4  # what errors in float64 are taken over at least: terms of size one may cancel, and leave 1e-16
STORED = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-4, torch.float64: EXACT}  # rounded once
LOWERED, ROUNDED = 2e-4, 1e-2  # the kernel's source in float32, without and with a rounding to 16 bits on the way


@dataclass(frozen=True, slots=True)
class Difference:
    """The place of a tensor's largest error, and the two values there."""

    error: float
    place: tuple[int, ...] = ()
    expected: float = math.nan
    got: float = math.nan
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """One output, or one gradient, over all draws: the worst of its differences, and at which sizes that was.

    ``kind`` is "value" (float64), "stored" (in the dtypes of memory), "lowered" (the kernel's source) or "gradient"
    (the derived backward, float64)."""

    name: str
    kind: str
    limit: float
    worst: Difference
    at: str

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return not self.worst.problem and self.worst.error <= self.limit

    def __str__(self) -> str:
        if self.worst.problem:
            return f"{self.name}: {self.worst.problem} at {self.at}"
        place = f"[{', '.join(map(str, self.worst.place))}]" if self.worst.place else ""
        return (
            f"{self.name}: largest error {self.worst.error:.2g}, {self.limit:.2g} is allowed; at {self.at}, "
            f"{self.name}{place} is {self.worst.got:.9g}, expected {self.worst.expected:.9g}"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON; numbers that are none are null."""
        w = self.worst
        return {
            "name": self.name,
            "kind": self.kind,
            "ok": self.ok,
            "max_error": _number(w.error),
            "limit": self.limit,
            "at": self.at,
            "place": list(w.place),
            "expected": _number(w.expected),
            "got": _number(w.got),
            "problem": w.problem,
        }


def difference(got: Tensor | None, expected: Tensor) -> Difference:
    """The largest error; what is missing, of another shape, or not finite where the other is, is infinitely wrong."""
    if got is None:
        return Difference(math.inf, problem="it is missing")
    if got.shape != expected.shape:
        problem = f"it has the shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        return Difference(math.inf, problem=problem)
    if not expected.numel():
        return Difference(0.0)
    a, b = got.detach().double(), expected.detach().double()
    finite = torch.where(b.isfinite(), b, 0.0)
    scale = finite.abs() + finite.square().mean().sqrt()
    if got.dtype is expected.dtype is torch.float64:
        scale = scale.clamp(min=LEAST)
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs() / scale).nan_to_num(math.inf, math.inf)
    flat = int(error.flatten().argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), b.shape)) if b.dim() else ()
    return Difference(float(error.flatten()[flat]), place, float(b.flatten()[flat]), float(a.flatten()[flat]))


def worst(found: Iterable[Compared]) -> list[Compared]:
    """For each kind and name the worst of its comparisons, in order of first appearance."""
    kept: dict[tuple[str, str], Compared] = {}
    for c in found:
        seen = kept.get((c.kind, c.name))
        if seen is None or _rank(c) > _rank(seen):
            kept[c.kind, c.name] = c
    return list(kept.values())


def _rank(c: Compared) -> float:
    return c.worst.error / c.limit


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None
