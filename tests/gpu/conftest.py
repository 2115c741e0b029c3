"""What the tests of kernels share: the marker, the device, exact float32 products, and outputs full of NaN."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ways
from codetta.backends.base import Runnable
from codetta.backends.reference import execute
from codetta.backends.reference.execute import Executable
from codetta.capture.backend import backend
from codetta.partition.plan import Plan
from target import DEVICE, KERNELS, STANDIN, why_not

# PyTorch asks for one of cuBLAS's two workspaces when its deterministic algorithms are on, as in `verify`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is marked ``gpu``, but not on the stand-in. Warnings of other packages are theirs; one of ours
    says that kernels were not used, which is an error."""
    ours = [item for item in items if HERE in item.path.parents]
    reason = why_not() if ours and torch.cuda.is_available() else None
    for item in ours:
        item.add_marker(pytest.mark.filterwarnings("ignore", "error:codetta"))
        if not STANDIN:
            item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def _codetta_is_a_backend_by_name() -> None:
    """``backend="codetta"`` also where the package is on the path and not installed."""
    if "codetta" not in torch._dynamo.list_backends(()):
        torch._dynamo.register_backend(backend, name="codetta")


@pytest.fixture(autouse=True, scope="session")
def _plans_are_prepared() -> Iterator[None]:
    """On the stand-in, ``CODETTA_TEST_PREPARE=module:function`` is given every plan that these tests run: kernels can
    so be compiled into a cache where there is no GPU, before the tests need them where there is one."""
    named = os.environ.get("CODETTA_TEST_PREPARE")
    if not (STANDIN and named):
        yield
        return
    prepare = pkgutil.resolve_name(named)

    def prepared(plan: Plan, **options: bool) -> Runnable:
        prepare(plan)
        return Executable(plan, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "Executable", prepared)
        yield


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 products are exact, and what ``ways`` builds is moved to the device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    monkeypatch.setattr(ways, "DEVICE", DEVICE)


@pytest.fixture(autouse=True)
def _outputs_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that kernels write to holds NaN, or the most negative integer, before they do."""
    if STANDIN:
        return
    fresh = importlib.import_module(f"{KERNELS}.memory").empty
    importlib.import_module(f"{KERNELS}.execute")  # which loads all that takes memory

    def poisoned(shape: object, dtype: torch.dtype, device: object) -> Tensor:
        t: Tensor = fresh(shape, dtype, device)
        if dtype == torch.bool:
            return t.fill_(True)
        return t.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min)

    holders = [m for n, m in sys.modules.items() if n.startswith(KERNELS) and getattr(m, "empty", None) is fresh]
    for module in holders:
        monkeypatch.setattr(module, "empty", poisoned)


@pytest.fixture
def cuda_only() -> None:
    """Streams, graphs and huge tensors, which the stand-in has not."""
    if STANDIN:
        pytest.skip("the stand-in is a CPU")


@pytest.fixture
def free_memory() -> Iterator[None]:
    """What a test of tens of GB leaves in PyTorch's cache goes back."""
    yield
    if not STANDIN:
        torch.cuda.empty_cache()
