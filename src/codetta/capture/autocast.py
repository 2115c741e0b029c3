"""What autocast does to one operator: which of its tensors it casts, and to which dtype."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Autocast = tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class Casts:
    """``of_argument``: dtype per position among the flattened arguments; ``inside``: casts of the op's own values."""

    of_argument: dict[int, torch.dtype]
    inside: bool


@dataclass(slots=True)
class _Seen:
    """The casts of one run: of an argument (position, dtype), or of something computed inside (dtype)."""

    arguments: list[tuple[int, torch.dtype]] = field(default_factory=list)
    inside: list[torch.dtype] = field(default_factory=list)


class _CastRecorder(TorchDispatchMode):
    """Notes every copy to another dtype, and whether it is an argument that is copied."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.position = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self.seen = _Seen()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``; if it is a cast, note it."""
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func is aten._to_copy.default and dtype is not None:
            position = self.position.get(id(args[0]))
            if position is None:
                self.seen.inside.append(dtype)
            else:
                self.seen.arguments.append((position, dtype))
        return func(*args, **kwargs)


def find_casts(func: OpOverload, args: Any, kwargs: Any, autocast: Autocast) -> Casts:
    """The casts that ``autocast`` adds to ``func(*args, **kwargs)``, found by running it on fake tensors both ways.

    No list of operators is needed, so PyTorch's own lists (per device, per version, custom ops) are followed exactly.
    """
    cast = _run_recorded(func, args, kwargs, autocast)
    if not cast.arguments and not cast.inside:
        return Casts({}, inside=False)
    try:
        plain = _run_recorded(func, args, kwargs, ())
    except RuntimeError:  # mixed dtypes that only autocast brings together
        plain = _Seen()
    return Casts(
        of_argument=dict(c for c in cast.arguments if c not in plain.arguments),
        inside=len(cast.inside) > len(plain.inside),
    )


def result_dtypes(func: OpOverload, args: Any, kwargs: Any, autocast: Autocast) -> list[torch.dtype]:
    """The dtypes of all tensors that ``func`` returns under ``autocast``."""
    with torch.no_grad(), autocast_as(autocast):
        result = func(*args, **kwargs)
    return [t.dtype for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


def _run_recorded(func: OpOverload, args: Any, kwargs: Any, autocast: Autocast) -> _Seen:
    recorder = _CastRecorder(pytree.tree_leaves((args, kwargs)))
    with torch.no_grad(), autocast_as(autocast), recorder:
        func(*args, **kwargs)
    return recorder.seen


@contextmanager
def autocast_as(autocast: Autocast, device_types: Sequence[str] = ("cpu", "cuda")) -> Iterator[None]:
    """Exactly ``autocast`` and nothing ambient. The cache is off: a cached weight would hide its cast."""
    wanted = dict(autocast)
    with ExitStack() as stack:
        for kind in {*device_types, *wanted}:
            dtype = wanted.get(kind)
            stack.enter_context(
                torch.autocast(kind, enabled=dtype is not None, dtype=dtype, cache_enabled=False),
            )
        torch.clear_autocast_cache()
        yield
