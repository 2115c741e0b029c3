"""C29: PyTorch's own check of the ops behind ``linear_cross_entropy``: schema, fakes, autograd, tracing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from codetta import linear_cross_entropy
from codetta.nn import head_ops, slabs
from codetta.nn.head_graphs import LARGEST, LOWER, LSE, TARGET, TOTAL, UPPER
from codetta.nn.head_run import What
from codetta.testing import relative_error

OPS = getattr(torch.ops, head_ops.LIBRARY.ns)
WITHOUT_TRACING = ("test_schema", "test_autograd_registration", "test_faketensor")
TOKENS, COLUMNS = 12, 201  # three slabs of whole 16 bytes and a column beyond


def tensors(dtype: torch.dtype, bias: bool, tokens: int = TOKENS) -> list[Tensor]:
    """x, weight, the targets' columns, the shift of wide logits, the bias."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator).to(dtype).requires_grad_() for n in (tokens, COLUMNS))
    index = torch.randint(-1, COLUMNS, (tokens,), generator=generator, dtype=torch.int32)
    shift = [torch.randn(tokens, generator=generator)] if dtype == torch.float32 else []
    more = [torch.randn(COLUMNS, generator=generator).to(dtype).requires_grad_()] if bias else []
    return [x, weight, index, *shift, *more]


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("dtype, bias", [(torch.float32, True), (torch.bfloat16, False)])
def test_opcheck(dtype, bias, lends, mode, monkeypatch: pytest.MonkeyPatch):
    """All three ops, in every way of holding logits. Lent memory is not written everywhere, and never traced."""
    monkeypatch.setattr(slabs, "LEAN_SLAB", 1)
    monkeypatch.setattr(slabs, "OF_GRADIENT", 1 << 30)
    monkeypatch.setattr(slabs, "SLAB_GRAIN", 64)
    ts, what = tensors(dtype, bias), What(0.5, 3.0, mode, lends).text
    plain, names = [t.detach() for t in ts], [LSE, TARGET, TOTAL]
    wanted = ",".join([*names, LARGEST, UPPER, LOWER])
    opcheck(OPS.head.default, (ts, what, wanted))
    tracing = {"test_utils": WITHOUT_TRACING} if lends else {}
    opcheck(OPS.head_forward.default, (plain, what, wanted), **tracing)
    lse, *rest = OPS.head_forward(plain, what, wanted)
    kept, grads = [lse, *rest[5:]], [torch.rand(TOKENS, dtype=lse.dtype) for _ in names]
    for needed in ([True, True, bias], [False, True, False]):
        opcheck(OPS.head_backward.default, (plain, what, kept, grads, ",".join(names), needed))


def test_opcheck_without_tokens():
    """C13."""
    ts = tensors(torch.bfloat16, True, 0)
    opcheck(OPS.head.default, (ts, What(1.0, None, "fast", False).text, f"{LSE},{TARGET}"))


def losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Two calls that a compiler could take for one; each writes over the logits that it held."""
    first, second = (linear_cross_entropy(x, weight, targets, memory="fast") for _ in range(2))
    return first + 3.0 * second.square()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_logits_are_written_over_only_where_nobody_asks_again(backend, dtype, most):
    """C19, C26: two equal calls in one compiled graph, a graph that is kept, and then one that is not."""
    x, weight, index, *_ = tensors(dtype, False)
    targets = index.clamp(min=0).long()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    one = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*wide), targets)
    exact = torch.autograd.grad(one + 3.0 * one.square(), wide)
    torch._dynamo.reset()
    found = torch.compile(losses, backend=backend)(x, weight, targets)
    for keeps in (True, True, False):
        for got, want in zip(torch.autograd.grad(found, (x, weight), retain_graph=keeps), exact, strict=True):
            assert relative_error(got, want) < most


def test_a_compiled_backward_writes_over_the_logits(monkeypatch: pytest.MonkeyPatch):
    """No second matrix of logits: the held one holds their gradient after a backward whose graph is not kept."""
    seen: list[bool] = []
    inner = head_ops.backward

    def watched(call, lse, held, grads, wanted, given_up):
        before = held[0].clone()
        found = inner(call, lse, held, grads, wanted, given_up)
        seen.append(not torch.equal(before, held[0]))
        return found

    monkeypatch.setattr(head_ops, "backward", watched)
    x, weight, index, *_ = tensors(torch.bfloat16, False)
    torch._dynamo.reset()
    found = torch.compile(losses, backend="aot_eager")(x, weight, index.clamp(min=0).long())
    torch.autograd.grad(found, (x, weight), retain_graph=True)
    torch.autograd.grad(found, (x, weight))
    assert seen == [False, False, True, True]
