"""Where the tests of kernels run: on the GPU, or, to try the tests themselves, on the CPU through the reference."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

from torch import Tensor

from codetta.backends import get_backend
from codetta.backends.base import Runnable
from codetta.partition.plan import Plan

STANDIN = os.environ.get("CODETTA_TEST_STANDIN") == "1"
DEVICE = "cpu" if STANDIN else "cuda"
BACKEND = "reference" if STANDIN else "hopper"
KERNELS = "codetta.backends.hopper"


def why_not() -> str | None:
    """The reason why kernels cannot be tested here, or None if they can; the stand-in always can."""
    if STANDIN:
        return None
    if importlib.util.find_spec(f"{KERNELS}.support") is None:
        return f"there is no {KERNELS}.support"
    return importlib.import_module(f"{KERNELS}.support").why_not()


@cache
def executable(plan: Plan) -> Runnable:
    """A plan on the backend under test, made once a process: it serves every number of rows."""
    return get_backend(BACKEND)(plan)


def here(t: Tensor) -> Tensor:
    """The tensor on the device under test, detached."""
    return t.detach().to(DEVICE)


def sized(on_gpu: int, standin: int) -> int:
    """A size for the GPU, and a small one for the stand-in."""
    return standin if STANDIN else on_gpu
