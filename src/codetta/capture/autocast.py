"""What autocast does to one operator, said in explicit casts of its arguments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Autocast = tuple[tuple[str, torch.dtype], ...]

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Explicit:
    """How to call an operator without autocast: casts by position among its flattened arguments, a ``dtype=``."""

    casts: dict[int, torch.dtype]
    dtype: torch.dtype | None = None


@dataclass(slots=True)
class _Casts:
    """The casts of one run: of arguments, by position, and of values computed inside the operator."""

    arguments: dict[int, torch.dtype] = field(default_factory=dict)
    inside: list[torch.dtype] = field(default_factory=list)


class _CastRecorder(TorchDispatchMode):
    """Notes every copy to another dtype, and whether it is an argument that is copied."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.leaves = leaves
        self.casts = _Casts()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``; if it is a cast, note it."""
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func is aten._to_copy.default and dtype is not None:
            positions = [i for i, leaf in enumerate(self.leaves) if leaf is args[0]]
            self.casts.arguments.update(dict.fromkeys(positions, dtype))
            if not positions:
                self.casts.inside.append(dtype)
        return func(*args, **kwargs)


def explicit_form(func: OpOverload, args: Any, kwargs: Any, autocast: Autocast) -> Explicit | None:
    """The call of ``func`` that does without autocast what ``func(*args, **kwargs)`` does with it.

    ``None`` if there is none, because autocast acts between the steps inside. The arguments are fake tensors and the
    answer is found by running ``func`` on them, so PyTorch's lists (per device, per version, custom ops) are followed.
    """
    found, expected = _run_recorded(func, args, kwargs, autocast)
    try:
        usual, plain = _run_recorded(func, args, kwargs, ())
    except RuntimeError:  # mixed dtypes that only autocast brings together
        usual, plain = _Casts(), []
    casts = {i: dtype for i, dtype in found.arguments.items() if usual.arguments.get(i) != dtype}
    inside = len(found.inside) > len(usual.inside)
    if not casts and not inside and plain == expected:
        return Explicit({})
    for candidate in _candidates(func, args, kwargs, casts, inside, expected):
        if _result_dtypes(func, args, kwargs, candidate) == expected:
            return candidate
    return None


def _candidates(
    func: OpOverload,
    args: Any,
    kwargs: Any,
    casts: dict[int, torch.dtype],
    inside: bool,
    expected: Sequence[torch.dtype],
) -> Iterator[Explicit]:
    """Calls worth trying, from the most to the least literal."""
    if casts or not inside:
        yield Explicit(casts)
    names = [a.name for a in func._schema.arguments]
    if "dtype" in names and kwargs.get("dtype") is None and names.index("dtype") >= len(args) and expected:
        yield Explicit(casts, dtype=expected[0])
    if set(expected) == {torch.float32}:
        # Widening is exact, so doing it at the start loses nothing against doing it half-way.
        leaves = pytree.tree_leaves((args, kwargs))
        narrow = {i: torch.float32 for i, x in enumerate(leaves) if isinstance(x, Tensor) and _is_narrow(x.dtype)}
        if narrow and set(casts.values()) <= {torch.float32}:
            yield Explicit(narrow)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def apply_explicit(args: Any, kwargs: Any, form: Explicit, cast: Callable[[Any, torch.dtype], Any]) -> tuple[Any, Any]:
    """The arguments with ``cast(argument, dtype)`` in the places that ``form`` names."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for position, dtype in form.casts.items():
        leaves[position] = cast(leaves[position], dtype)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs if form.dtype is None else {**kwargs, "dtype": form.dtype}


def _result_dtypes(func: OpOverload, args: Any, kwargs: Any, form: Explicit) -> list[torch.dtype]:
    args, kwargs = apply_explicit(args, kwargs, form, lambda x, dtype: x.to(dtype))
    try:
        return _run_recorded(func, args, kwargs, ())[1]
    except RuntimeError:  # this form is not a legal call
        return []


def _run_recorded(func: OpOverload, args: Any, kwargs: Any, autocast: Autocast) -> tuple[_Casts, list[torch.dtype]]:
    """The casts that happen in a call, and the dtypes of the tensors it returns."""
    recorder = _CastRecorder(pytree.tree_leaves((args, kwargs)))
    with torch.no_grad(), autocast_as(autocast), recorder:
        result = func(*args, **kwargs)
    return recorder.casts, [t.dtype for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


@contextmanager
def autocast_as(autocast: Autocast) -> Iterator[None]:
    """Exactly ``autocast`` and nothing ambient. The cache is off: a cached weight would hide its cast."""
    wanted = dict(autocast)
    kinds = {*wanted, *(k for k in _KINDS if torch.is_autocast_enabled(k))}
    before = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    cache = torch.is_autocast_cache_enabled()
    try:
        for kind in kinds:
            _set(kind, kind in wanted, wanted.get(kind, torch.get_autocast_dtype(kind)))
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        yield
    finally:
        for kind, enabled, dtype in before:
            _set(kind, enabled, dtype)
        torch.set_autocast_cache_enabled(cache)


def _set(kind: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
