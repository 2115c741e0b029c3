"""Memory for what kernels write, and views of it: on a GPU without the dispatcher, whose turn takes a microsecond.

PyTorch's generated code allocates the same way, by functions that are no public API. Where they are missing, public
ones do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_GENERATED: Any = getattr(torch._C._dynamo, "guards", None)
_ON_GPU: Callable[..., Tensor] | None = getattr(_GENERATED, "_empty_strided_cuda", None)  # on the current device
_VIEW: Callable[..., Tensor] | None = getattr(_GENERATED, "_reinterpret_tensor", None)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of any content, the one place where outputs come from: tests fill it with NaN. A GPU must be the
    current one."""
    if device.type == "cuda" and _ON_GPU is not None:
        return _ON_GPU(tuple(shape), strides_of(shape), dtype)  # exactly a tuple: a tensor's shape is not
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    if len(shape) == 2:  # what most have, made first
        return max(shape[1], 1), 1
    found = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        found[i - 1] = found[i] * max(shape[i], 1)
    return tuple(found)


def _view(t: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return t.as_strided(shape, strides, t.storage_offset() + offset)


# A view of a tensor's memory that begins ``offset`` elements after it: view(tensor, shape, strides, offset).
view: Callable[[Tensor, Sequence[int], Sequence[int], int], Tensor] = _VIEW or _view
