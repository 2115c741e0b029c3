"""The device that kernels are launched on, and its current stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """The GPU that some of the tensors are on, or what all are on."""
    return next((t.device for t in tensors if t.is_cuda), tensors[0].device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be that of a model."""
    other = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if other else nullcontext()


def stream_of(device: torch.device) -> int:
    """The address of a GPU's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0
