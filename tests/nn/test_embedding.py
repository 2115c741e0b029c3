"""The gradient of a weight that an embedding and a head share, next to PyTorch's in float64; on PyTorch operators, and
on the kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codetta.backends import add_rows
from codetta.nn.embedding import embedding_and_weight
from codetta.testing import relative_error
from interpreted import as_a_gpu

COLUMNS = 50


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """Kernels run in Triton's interpreter, which rounds as a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        as_a_gpu(patch)
        yield


def problem(seed: int, tokens: int, features: int, dtype: torch.dtype, few: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient, ids, of which some come often, and rows."""
    generator = torch.Generator().manual_seed(seed)
    into = torch.randn(COLUMNS, features, generator=generator).to(dtype)
    ids = torch.randint(3 if few else COLUMNS, (tokens,), generator=generator)
    return into, ids, torch.randn(tokens, features, generator=generator).to(dtype)


@pytest.mark.parametrize("backend", ["reference", "hopper"])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([0, 1, 7, 8, 9, 60]),
    features=st.sampled_from([8, 520]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padding=st.sampled_from([-1, 2]),
    few=st.booleans(),
)
def test_rows_are_added(backend, seed, tokens, features, dtype, padding, few):
    """A row that is hit is rounded once; the others keep their bits."""
    into, ids, rows = problem(seed, tokens, features, dtype, few)
    kept = (ids != padding)[:, None]
    wanted = into.double().index_add(0, ids, torch.where(kept, rows, 0).double())
    hit = torch.zeros(COLUMNS, dtype=torch.bool)
    hit[ids[ids != padding]] = True
    found = into.clone()
    add_rows(backend)(found, ids, rows, padding)
    assert torch.equal(found[~hit], into[~hit])
    one = torch.finfo(dtype).eps / 2
    terms = into.double().abs().index_add(0, ids, torch.where(kept, rows, 0).double().abs())
    assert ((found.double() - wanted).abs() <= 1.01 * one * wanted.abs() + 1e-6 * terms + 1e-7).all()


class Tied(torch.nn.Module):
    """An embedding and a head with one weight. Written in ops that make the gradient of the head anew."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.padding = torch.nn.Parameter(torch.randn(COLUMNS, 16)), padding

    def forward(self, ids: Tensor, ours: bool) -> Tensor:
        if ours:
            x, weight = embedding_and_weight(self.weight, ids, -1 if self.padding is None else self.padding)
        else:
            x, weight = F.embedding(ids, self.weight, self.padding), self.weight
        return F.cross_entropy(F.linear(torch.tanh(x), weight).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("padding", [None, 3])
def test_gradient_of_a_tied_weight(padding):
    model, ids = Tied(padding), torch.randint(COLUMNS, (2, 30), generator=torch.Generator().manual_seed(1))
    ids[0, :5] = 3
    found: list[Any] = [torch.autograd.grad(model(ids, ours), model.weight)[0] for ours in (True, False)]
    assert relative_error(found[0], found[1].double()) < 1e-6


def test_a_weight_that_nothing_else_reads_has_a_gradient_all_the_same():
    weight = torch.randn(COLUMNS, 16, requires_grad=True)
    ids = torch.tensor([[1, 4, 4]])
    rows, _ = embedding_and_weight(weight, ids, -1)
    (found,) = torch.autograd.grad(rows.sum(), weight)
    assert torch.equal(found, torch.nn.functional.one_hot(ids[0], COLUMNS).sum(0)[:, None].expand(-1, 16).float())
    _, again = embedding_and_weight(weight, ids, -1)
    (found,) = torch.autograd.grad((2 * again).sum(), weight)
    assert torch.equal(found, torch.full_like(weight, 2.0))


def test_op_keeps_its_promises():
    into, ids, rows = problem(0, 9, 8, torch.float32, True)
    torch.library.opcheck(torch.ops.codetta.add_rows_.default, (into, ids, rows, -1))
