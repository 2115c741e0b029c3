"""Attention as an op on the reference backend: against PyTorch's own in float64, with a mask written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attending import exact, heads
from codetta.errors import UnsupportedError
from codetta.nn.attention import flash_attention
from codetta.testing import relative_error


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 40),
    more=st.sampled_from([0, 0, 7]),
    counts=st.sampled_from([(1, 1), (3, 1), (2, 2), (6, 2)]),
    kind=st.sampled_from(["all", "causal", "window"]),
    scale=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_forward_and_gradients(seed, length, more, counts, kind, scale, dtype):
    keys = length + more if kind == "all" else length
    given_heads = heads(seed, counts, length, 8, dtype, keys=keys)
    window = 5 if kind == "window" else None
    found = flash_attention(*given_heads, causal=kind != "all", window=window, scale=scale)
    d_out = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in given_heads]
    wanted = exact(*wide, kind != "all", window, scale)
    pairs = zip(
        [found, *torch.autograd.grad(found, given_heads, d_out)],
        [wanted, *torch.autograd.grad(wanted, wide, d_out.double())],
        strict=True,
    )
    bar = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        # a softmax over one key has no gradient: there is nothing but rounding to compare
        assert relative_error(ours, theirs) < bar or theirs.norm() < 1e-6 * d_out.double().norm()
    assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (6, 2)])
def test_what_comes_out_lies_as_compilers_are_told(counts):
    q, k, v = (t.detach().transpose(1, 2) for t in heads(0, counts, 5, 8, torch.float32))
    out, lse = torch.ops.codetta.attention(q, k, v, True, None, 0.3)
    found = torch.ops.codetta.attention_backward(torch.ones_like(out), q, k, v, out, lse, True, None, 0.3)
    assert all(t.is_contiguous() for t in (out, lse, *found))


def test_ops_keep_their_promises():
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in heads(0, (4, 2), 12, 8, torch.float32))
    torch.library.opcheck(torch.ops.codetta.attention.default, (q, k, v, True, None, 0.3))
    torch.library.opcheck(torch.ops.codetta.attention.default, (q, k, v, False, None, 0.3))
    torch.library.opcheck(torch.ops.codetta.attention.default, (q, k, v, True, 4, 0.3))


def test_there_is_no_second_derivative():
    given_heads = heads(0, (2, 1), 8, 8, torch.float32)
    found: Any = torch.autograd.grad(flash_attention(*given_heads, causal=True).sum(), given_heads, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        found[0].sum().backward()
