"""Hand-written epilogues on a GPU: as operators, through our kernels, against plain PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from codetta.testing import relative_error
from operators import block, plain_block
from target import DEVICE

LIMIT = 1e-2  # of gradients through two bf16 GEMMs; a term left out is off by more than a tenth


def results(fn, leaves: list[Tensor]) -> list[Tensor]:
    outputs = list(fn(*leaves))
    weights = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64, device=t.device).view_as(t) for t in outputs]
    grads = torch.autograd.grad(outputs, leaves, [w.to(t.dtype) for w, t in zip(weights, outputs, strict=True)])
    return [t.detach() for t in (*outputs, *grads)]


@pytest.mark.parametrize("backend", [None, "codetta"])
def test_operators_on_kernels(backend):
    torch.manual_seed(0)
    shapes = [(3, 171, 512), (1024, 512), (3, 171, 1024), (1024,), (2048, 1024)]
    exact = [torch.randn(s, dtype=torch.float64, device=DEVICE) * (s[-1] ** -0.5 if len(s) == 2 else 1) for s in shapes]
    given = [t.bfloat16().requires_grad_() for t in exact]
    wanted = results(plain_block, [t.detach().double().requires_grad_() for t in given])
    compiled = block if backend is None else torch.compile(block, backend=backend, fullgraph=True)
    found = results(compiled, given)
    assert [t.device.type for t in found] == [DEVICE] * 7
    for got, want in zip(found, wanted, strict=True):
        assert relative_error(got, want) <= LIMIT
