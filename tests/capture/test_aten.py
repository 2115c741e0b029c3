"""Each ATen operator of the table, behind a GEMM: understood, and the same values and gradients as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.capture.aten import TABLE
from cutting import Cut, assert_same, cut_function

B, S, D, H = 2, 3, 16, 4


def made(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def heads(y: Tensor) -> Tensor:
    return y.view(B, S, H, D // H).transpose(1, 2)


def behind_gemm(fn: Callable[..., Any], *more: Tensor, cols: int = D) -> tuple[Cut, tuple[Tensor, ...]]:
    """``fn`` of a linear's result and more tensors, cut; and its inputs."""
    inputs = (made(B, S, D, seed=1), made(cols, D, seed=2), *more)
    return cut_function(lambda x, w, *rest: fn(F.linear(x, w), *rest), *inputs), inputs


UNARY: dict[str, Callable[[Tensor], Any]] = {
    "abs": torch.abs,
    "exp": torch.exp,
    "log": lambda y: torch.log(y.abs() + 1),
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sqrt": lambda y: torch.sqrt(y.abs() + 1),
    "rsqrt": lambda y: torch.rsqrt(y.abs() + 1),
    "sin": torch.sin,
    "cos": torch.cos,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu": F.relu,
    "neg": lambda y: -y,
    "reciprocal": lambda y: 1 / (y.abs() + 1) + (y.abs() + 1).reciprocal(),
    "square": torch.square,
    "powers": lambda y: y**2 + y**3 - y**4,
    "roots": lambda y: (y.abs() + 1) ** 0.5 * (y.abs() + 1) ** -0.5 + (y.abs() + 1) ** -1 - (y.abs() + 1) ** -2,
    "numbers": lambda y: (3 - y) / 2 + 2 * y - 1,
    "alpha": lambda y: torch.add(y, y, alpha=2) - torch.sub(y, y * y, alpha=0.5) + torch.rsub(y, 1, alpha=3),
    "clamp": lambda y: y.clamp(-0.5, 0.5) + y.clamp_min(0.1) - y.clamp_max(0.2),
    "maximum": lambda y: torch.maximum(y, y * y) - torch.minimum(y, y * 0.5),
    "comparisons": lambda y: torch.where((y > 0) & (y < 1) | ~(y <= 2), y, y * 0.1),
    "masked_fill": lambda y: y.masked_fill(y > 0.5, 0.0),
    "bool to float": lambda y: (y >= 0).to(y.dtype) * y + (y == 0.5).double() - (y != 0).type_as(y),
    "softcap": lambda y: 30 * torch.tanh(y / 30),
    "glu": F.glu,
    "dropout off": lambda y: F.dropout(y, 0.5, training=False) + F.dropout(y, 0.0, training=True),
    "sum": lambda y: y.sum(-1, keepdim=True) * y,
    "sum without dim": lambda y: y.sum(-1),
    "sum of all": lambda y: (y * y).sum(),
    "sum of dims": lambda y: y.sum((0, 1, 2), keepdim=True),
    "sum of rows": lambda y: y.sum((0, 1)) + y.sum((0, 1), keepdim=True),
    "mean": lambda y: y - y.mean(-1, keepdim=True),
    "amax": lambda y: y - y.amax(-1, keepdim=True),
    "mean of heads": lambda y: heads(y) - heads(y).mean(-1, keepdim=True),
    "sum over heads": lambda y: heads(y).sum((1, 3)),
    "rms_norm": lambda y: F.rms_norm(y, (D,), eps=1e-3),
    "layer_norm": lambda y: F.layer_norm(y, (D,)),
    "rms_norm of heads": lambda y: F.rms_norm(heads(y), (D // H,), eps=1e-3),
    "chain of views": lambda y: (
        heads(y).transpose(1, 2).flatten(2).unflatten(-1, (2, -1)).squeeze(0).permute(3, 1, 0, 2)
    ),
    "movedim": lambda y: y.view(B, S, H, -1).movedim(2, 1).swapaxes(0, 1).unsqueeze(1),
    "flat": lambda y: y.reshape(-1, D).t() * 2,
    "chunk": lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
    "split": lambda y: y.split([8, 4, 4], -1),
    "split equal": lambda y: [t * (i + 1) for i, t in enumerate(y.split(4, -1))],
    "slices": lambda y: (y[..., :8] * 2, y[..., 8:12], y[..., 12:]),
    "narrow": lambda y: y.narrow(-1, 4, 8) * 2,
    "slices of heads": lambda y: (heads(y)[:, :2], heads(y)[:, 2:3], heads(y)[:, 3:]),
    "select": lambda y: y.view(B, S, 2, -1)[:, :, 1] * y.view(B, S, 2, -1).select(2, 0),
    "unbind": lambda y: y.view(B, S, H, 2, 2).unbind(3),
    "rotate half": lambda y: torch.cat([-heads(y)[..., 2:], heads(y)[..., :2]], -1),
    "cat of ranges": lambda y: torch.cat([y[..., 4:], y[..., :4] * 2], -1),
    "cat of heads": lambda y: torch.cat([heads(y), heads(y)[:, :2] * 2], 1),
    "stack": lambda y: torch.stack([y[..., ::1], y * 2], -2).flatten(-2),
    "adjacent": lambda y: torch.stack([-y.view(B, S, -1, 2)[..., 1], y.view(B, S, -1, 2)[..., 0]], -1).flatten(2),
}


@pytest.mark.parametrize("name", UNARY)
def test_an_operator_on_a_gemm(name: str) -> None:
    cut, inputs = behind_gemm(UNARY[name])
    assert cut.opaque() == []
    assert cut.gemms() == [1]
    assert_same(cut, *inputs)


WITH_OTHERS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "residual": (lambda y, r: r + y, ((B, S, D),)),
    "bias": (lambda y, b: y + b, ((D,),)),
    "gain first": (lambda y, g: g * y, ((D,),)),
    "offset gain": (lambda y, g: y * (1 + g), ((D,),)),
    "row scale": (lambda y, r: y * r, ((B, S, 1),)),
    "number": (lambda y, a: y * a, ((),)),
    "one": (lambda y, a: y * a, ((1,),)),
    "positions": (lambda y, p: y + p, ((S, D),)),
    "position of one batch": (lambda y, p: y + p, ((1, S, D),)),
    "per batch": (lambda y, p: y * p, ((B, 1, 1),)),
    "table": (lambda y, c: heads(y) * c, ((B, 1, S, D // H),)),
    "table of one batch": (lambda y, c: heads(y) * c, ((1, 1, S, D // H),)),
    "table without batch": (lambda y, c: heads(y) * c, ((S, D // H),)),
    "head scale": (lambda y, a: heads(y) * a, ((B, H, S, 1),)),
    "gain of a head": (lambda y, g: heads(y) * g, ((D // H,),)),
    "gain of all heads": (lambda y, g: heads(y) * g, ((H, 1, 1),)),
    "rms_norm": (lambda y, g: F.rms_norm(y, (D,), g, 1e-3), ((D,),)),
    "rms_norm of heads": (lambda y, g: F.rms_norm(heads(y), (D // H,), g, 1e-3), ((D // H,),)),
    "layer_norm": (lambda y, g, b: F.layer_norm(y, (D,), g, b, 1e-3), ((D,), (D,))),
    "another linear": (lambda y, w, b: F.linear(F.silu(y), w, b), ((8, D), (8,))),
    "matmul": (lambda y, w: y @ w, ((D, 8),)),
    "matmul transposed": (lambda y, w: y @ w.T + torch.matmul(y, w.t()), ((8, D),)),
    "addmm": (lambda y, b, w: torch.addmm(b, y.view(-1, D), w).view(B, S, 8), ((8,), (D, 8))),
    "addmm with a matrix": (lambda y, r, w: torch.addmm(r, y.view(-1, D), w), ((B * S, 8), (D, 8))),
    "mm": (lambda y, w: torch.mm(y.view(-1, D), w), ((D, 8),)),
    "siblings": (lambda y, w, v: F.silu(F.linear(y, w)) * F.linear(y, v), ((8, D), (8, D))),
    "one column": (lambda y, w: torch.sigmoid(F.linear(y, w)) * y, ((1, D),)),
    "where": (lambda y, r: torch.where(r > 0, y, r), ((B, S, D),)),
    "masked_fill": (lambda y, r: y.masked_fill(r > 0, 1.0), ((B, S, D),)),
    "cat with a normed": (lambda y, g: torch.cat([y, F.rms_norm(y, (D,), g)], -1), ((D,),)),
}


# What is made of outside tensors alone, and no GEMM needs.
OUTSIDE = {"where": {"gt"}, "masked_fill": {"gt"}}


@pytest.mark.parametrize("name", WITH_OTHERS)
def test_an_operator_with_other_tensors(name: str) -> None:
    fn, shapes = WITH_OTHERS[name]
    cut, inputs = behind_gemm(fn, *(made(*s, seed=3 + i) for i, s in enumerate(shapes)))
    assert not set(cut.opaque()) - OUTSIDE.get(name, set())
    assert len(cut.capture.segments) == 1
    assert_same(cut, *inputs)


# --- rotations --------------------------------------------------------------------------------------------------------


def rotate_complex(y: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(y.view(B, S, H, -1).reshape(B, S, H, -1, 2))
    return torch.view_as_real(pairs * table).flatten(3)


@pytest.mark.parametrize("shape", [(1, S, 1, 2), (B, S, 1, 2), (S, 1, 2)], ids=str)
def test_complex_rotation(shape: tuple[int, ...]) -> None:
    angles = made(*shape, grad=False)
    table = torch.polar(torch.ones_like(angles), angles)
    cut, inputs = behind_gemm(rotate_complex, table)
    assert cut.opaque() == []
    assert [str(n.attrs[0]) for n in cut.graph().inputs] == ["x", "weight", "cos", "sin"]
    assert_same(cut, *inputs)


def test_a_complex_result_is_made_by_pytorch() -> None:
    cut, inputs = behind_gemm(lambda y: torch.view_as_complex(y.view(B, S, -1, 2)).abs())
    assert cut.gemms() == [1]
    assert_same(cut, *inputs)


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", ["some", "none", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str, ignored: str) -> None:
    target = torch.arange(B * S) % 5
    target[{"some": slice(0, 4, 2), "none": slice(0), "all": slice(None)}[ignored]] = -100
    cut, inputs = behind_gemm(lambda y, t: F.cross_entropy(y.view(-1, D), t, reduction=reduction), target)
    assert cut.opaque() == []
    assert_same(cut, *inputs)
    if ignored == "all":
        (loss,) = [cut.run(*inputs)]
        grads = torch.autograd.grad(loss.sum(), inputs[:2])
        assert all((g == 0).all() for g in grads)


def test_the_ignored_index_may_be_a_class() -> None:
    target = torch.arange(B * S) % 3
    cut, inputs = behind_gemm(lambda y, t: F.cross_entropy(y.view(-1, D), t, ignore_index=1), target)
    assert_same(cut, *inputs)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y.view(-1, D), t, label_smoothing=0.1),
        lambda y, t: F.cross_entropy(y.view(-1, D), t, weight=torch.ones(D, dtype=torch.float64)),
        lambda y, t: F.cross_entropy(y.view(-1, D), F.one_hot(t, D).double()),
    ],
    ids=["smoothing", "weights", "probabilities"],
)
def test_other_losses_stay_with_pytorch(loss: Callable[..., Any]) -> None:
    cut, inputs = behind_gemm(loss, torch.arange(B * S) % 5)
    assert "cross_entropy_loss" in cut.opaque()
    assert_same(cut, *inputs)


# --- what is not understood -------------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda y: y.softmax(-1),
    "cumsum": lambda y: y.cumsum(-1),
    "a slice of rows": lambda y: y[:, 1:] * 2,
    "the mean of a sequence": lambda y: y.mean(1) * 2,
    "repetition": lambda y: heads(y)[:, :, None].expand(B, H, 2, S, D // H).flatten(1, 2) * 2,
    "index": lambda y: y[:, torch.arange(S)] * 2,
    "detach": lambda y: y.detach() * y,
    "a power": lambda y: (y.abs() + 1) ** 1.5,
    "a stepped slice": lambda y: y[..., ::2] * 2,
    "overlapping slices": lambda y: y[..., :8] * y[..., 4:12],
    "rows turned into columns": lambda y: y.transpose(1, 2).reshape(B, -1) * 2,
    "cat with an outside tensor": lambda y: torch.cat([y, torch.ones_like(y)], -1),
    "cat of rows": lambda y: torch.cat([y, y], 1),
    "a linear over heads": lambda y: F.linear(heads(y), torch.eye(D // H, dtype=y.dtype)) * 2,
    "bmm": lambda y: torch.bmm(y, y.transpose(1, 2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_left_alone(name: str) -> None:
    cut, inputs = behind_gemm(REFUSED[name])
    assert sum(cut.gemms()) >= 1
    assert all(o.reason for o in cut.capture.opaque)
    assert_same(cut, *inputs)


def test_dropout_draws_the_same_numbers() -> None:
    cut, inputs = behind_gemm(lambda y: F.dropout(y, 0.5) + F.dropout(y * 2, 0.25))
    assert cut.opaque() == ["dropout", "dropout", "add"]
    torch.manual_seed(3)
    expected = cut.gm(*inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(cut.run(*inputs), expected)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_results_are_rounded_as_aten_stores_them(dtype: torch.dtype) -> None:
    def fn(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        h = F.linear(x, w)
        r = torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return g * (h.float() * r).to(h.dtype)

    inputs = tuple(t.detach().to(dtype) for t in (made(B, S, D), made(D, D), made(D)))
    cut = cut_function(fn, *inputs)
    assert cut.opaque() == []
    torch.testing.assert_close(cut.run(*inputs), cut.gm(*inputs), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_default_eps_of_rms_norm_is_pytorchs(dtype: torch.dtype) -> None:
    x, w = (1e-3 * made(B * S, D).detach()).to(dtype), torch.eye(D, dtype=dtype)
    cut = cut_function(lambda x, w: F.rms_norm(F.linear(x, w), (D,)), x, w)
    torch.testing.assert_close(cut.run(x, w), cut.gm(x, w), rtol=4 * torch.finfo(dtype).eps, atol=0.0)


def test_a_float32_weight_is_cast_inside_the_segment() -> None:
    x, w = made(B, S, D).detach().bfloat16(), made(D, D).detach().float()
    cut = cut_function(lambda x, w: F.linear(x, w.to(torch.bfloat16)), x, w)
    assert [str(n.type) for n in cut.graph().inputs] == ["Tile[M, 16, bf16]", "Tile[16, 16, f32]"]
    torch.testing.assert_close(cut.run(x, w), cut.gm(x, w))


def test_every_operator_of_the_table_exists() -> None:
    assert all(isinstance(target, torch._ops.OpOverload) for target in TABLE)
