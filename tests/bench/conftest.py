"""What the tests of the benchmarks share: one thread, and peers played by PyTorch, as they are not installed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from codetta.bench import peers, plain
from codetta.bench.shapes import rotated


@pytest.fixture(autouse=True)
def _small_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everywhere, with one thread: the tensors are so small that more of them only wait for each other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    turned = (rotated(t.transpose(1, 2).flatten(2)[0], cos[0], sin[0], cos.shape[-1]) for t in (q, k))
    return tuple(t.view(1, t.shape[0], -1, cos.shape[-1]).transpose(1, 2) for t in turned)


def _add_norm(x: Tensor, r: Tensor, w: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Any:
    s = x + r
    return functional.rms_norm(s, (s.shape[-1],), w, eps), s


def _fused_add(x: Tensor, r: Tensor, w: Tensor, eps: float) -> None:
    r += x
    x.copy_(functional.rms_norm(r, (r.shape[-1],), w, eps))


def _silu_and_mul(x: Tensor, out: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return out.copy_(functional.silu(gate) * up)


LIGER = SimpleNamespace(
    liger_rope=_rope, liger_fused_add_rms_norm=_add_norm, liger_swiglu=lambda a, b: functional.silu(a) * b
)
FLASHINFER = SimpleNamespace(fused_add_rmsnorm=_fused_add, silu_and_mul=_silu_and_mul)


def _quack_call(expression: Any, *names: str) -> Any:
    def prepare(a: Tensor, w: Tensor, *operands: Any) -> Any:
        given = dict(zip(names, operands, strict=False))
        b = w if "z" in names else w.t()
        return lambda: expression(a @ b, **{n: t for n, t in given.items() if t is not None})

    return prepare


QUACK = SimpleNamespace(
    residual_rms=lambda a, w, residual, gain, eps, tuned: (
        lambda: {n: t for n, t in plain.residual_rms(a @ w.t(), residual, gain).items() if n != "ssq"}
    ),
    swiglu=_quack_call(plain.swiglu_interleaved, "rstd"),
    swiglu_backward=_quack_call(plain.swiglu_backward_interleaved, "z"),
    log_sum_exp=lambda a, w, rstd, tuned: lambda: {"lse": torch.logsumexp((a @ w.t()).float() * rstd[:, None], -1)},
)


@pytest.fixture
def all_peers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Each package's functions, with its arguments and layouts, played by PyTorch; FlashInfer's is handed out."""
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", LIGER)
    monkeypatch.setitem(sys.modules, "flashinfer", FLASHINFER)
    monkeypatch.setattr(peers, "_quack", lambda: QUACK)
    return FLASHINFER
