"""The accuracy bar: how far from float64 a result may be, measured against PyTorch eager in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import stdev

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Errors:
    """The relative errors of one tensor against float64: ours, and eager's in the same dtype."""

    ours: float
    eager: float
    dtype: torch.dtype
    is_scalar: bool = False

    @property
    def is_noise(self) -> bool:
        """Whether eager has no digit right: what is exactly zero (the gradient of a key's bias under softmax), where
        both sides have nothing but rounding."""
        return self.eager > 1.0

    @property
    def ratio(self) -> float:
        """Ours over eager's, each counted as at least an eighth of a unit in the last place.

        A tensor that is rounded once, to nearest, is about a fifth of a unit away. What is closer is exact or a lucky
        scalar, and a ratio of two such errors says nothing."""
        least = torch.finfo(self.dtype).eps / 8
        return max(self.ours, least) / max(self.eager, least)


@dataclass(frozen=True, slots=True)
class Bar:
    """Each tensor: at most ``factor`` times eager's error plus ``units`` in the last place. All tensors together: the
    geometric mean of the ratios at most ``mean``, or above it by no more than two standard errors of that mean: in
    float32 both sides round equally often, the true ratio is 1, and without this every second model would fail.

    A scalar's error is one draw a seed. Of two equally good losses over five seeds, one is off by more than 1.10 times
    the other in nine cases of twenty; by more than ``scalar_factor``, the 99th percentile, in one of a hundred. Scalars
    are therefore left out of the mean."""

    factor: float = 1.10
    units: float = 0.5
    mean: float = 1.0
    scalar_factor: float = 5.4

    def limit(self, errors: Errors) -> float:
        """The largest error that this tensor may have."""
        factor = self.scalar_factor if errors.is_scalar or errors.is_noise else self.factor
        return factor * errors.eager + self.units * torch.finfo(errors.dtype).eps

    def why_not(self, errors: Errors) -> str | None:
        """The reason this tensor misses the bar, or None if it clears it."""
        limit = self.limit(errors)
        if errors.ours <= limit:
            return None
        return f"relative error {errors.ours:.3g}, eager's is {errors.eager:.3g}: at most {limit:.3g} is allowed"

    def why_not_all(self, errors: Iterable[Errors]) -> str | None:
        """The reason these tensors together miss the bar, or None if they clear it."""
        errors = list(errors)
        found, limit = mean_ratio(errors), self.mean_limit(errors)
        if found <= limit:
            return None
        return f"the geometric mean of ours over eager's is {found:.4g}: at most {limit:.4g} is allowed"

    def mean_limit(self, errors: Iterable[Errors]) -> float:
        """The largest geometric mean that these tensors may have."""
        logs = [math.log(e.ratio) for e in errors if not e.is_scalar and math.isfinite(e.ratio)]
        noise = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        return self.mean * math.exp(2 * noise)


def pooled(errors: Sequence[Errors]) -> Errors:
    """The errors of one tensor over several seeds, as one: their geometric means.

    Where a sum cancels at one seed, both errors of that seed are large, and a mean of squares would see that seed
    alone. An error of less than an eighth of a unit in the last
    place counts as that eighth, unless all of them are 0."""
    dtype = errors[0].dtype
    ours, eager = _geometric([e.ours for e in errors], dtype), _geometric([e.eager for e in errors], dtype)
    return Errors(ours, eager, dtype, errors[0].is_scalar)


def _geometric(values: Sequence[float], dtype: torch.dtype) -> float:
    least = torch.finfo(dtype).eps / 8
    return geometric_mean(max(v, least) for v in values) if any(values) else 0.0


def relative_error(got: Tensor, reference: Tensor) -> float:
    """``||got - reference|| / ||reference||`` in float64.

    Where both are the same infinity or both NaN they agree. Against a reference of zeros only zeros are right: the
    error is 0, or infinite. So it is where ``got`` is not finite and the reference is."""
    got, reference = got.detach().double(), reference.detach().double()
    same = (got == reference) | (got.isnan() & reference.isnan())
    off = torch.where(same, 0.0, got - reference)
    distance = off.norm().item()
    if distance == 0.0:
        return 0.0
    size = torch.where(reference.isfinite(), reference, 0.0).norm().item()
    return distance / size if math.isfinite(distance) and size > 0.0 else math.inf


def mean_ratio(errors: Iterable[Errors]) -> float:
    """The geometric mean of ours over eager's; scalars do not count."""
    return geometric_mean(e.ratio for e in errors if not e.is_scalar)


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean; 1 of nothing."""
    logs = [math.log(r) if r > 0 else -math.inf for r in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0
