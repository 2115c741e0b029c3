"""QuACK and CuTe DSL made ready, before either is imported: the target, the cache, and what belongs to its key."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import torch

from codetta import settings

# The environment of a process that compiles for SM90 without a GPU, or without touching the one there is.
COMPILE_ONLY = {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}
GENERATED = "codetta_generated_epilogues"  # never a real module: workers get generated functions by value


@cache
def has_device() -> bool:
    """Whether kernels can be launched here; otherwise they are compiled for SM90 and not loaded."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def kernel_cache() -> Path:
    """Where compiled kernels are kept."""
    return settings.cache_dir() / "kernels"


def compiling_environment() -> dict[str, str]:
    """The environment of a worker: it finds what this process finds, and no GPU."""
    return {**os.environ, **COMPILE_ONLY, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _prepare() -> None:
    # Read by QuACK and CuTe DSL when they are imported. Without a GPU they would guess another target.
    if not has_device():
        for name in ("QUACK_ARCH", "CUTE_DSL_ARCH"):
            os.environ.setdefault(name, COMPILE_ONLY[name])
    if "quack" not in sys.modules:
        os.environ.setdefault("QUACK_CACHE_DIR", str(kernel_cache()))


def keep_attention_kernels() -> None:
    """Tell FlashAttention, before it is imported, to keep what it compiles beside our kernels."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(settings.cache_dir() / "attention"))


_prepare()

import quack.cache  # noqa: E402  the preparation above must come first
from quack.gemm_runtime import host  # noqa: E402

# Our operations and dialect are part of every kernel: a change of theirs must not find an older kernel.
quack.cache.EXTRA_SOURCE_DIRS.append(Path(__file__).resolve().parent / "device")
if not has_device():
    host.get_max_active_clusters = lambda clusters, **_: 132 // clusters  # the only question asked of the driver
