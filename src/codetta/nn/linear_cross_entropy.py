"""``linear_cross_entropy``: the LM head and its loss, without the logits' memory or without losing time to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from codetta import settings
from codetta.backends.autocast import autocast_dtype
from codetta.backends.hopper.support import why_not
from codetta.backends.reference.evaluate import DTYPE_OF
from codetta.errors import SettingsError, ShapeError, TypeMismatch
from codetta.nn import head_ops
from codetta.nn.exponentials import suits
from codetta.nn.head_graphs import LARGEST, LOWER, LSE, TARGET, TOTAL, UPPER, Head
from codetta.nn.head_run import What
from codetta.nn.slabs import EXPONENTIALS, Sizes, choose

Memory = Literal["auto", "fast", "lean"]
REDUCTIONS = ("mean", "sum", "none")


class LossMetrics(NamedTuple):
    """What a loss tells beside itself, detached: of each token the target's log-probability (0 of an ignored one) and
    the entropy of the prediction; and the share of tokens whose target has the largest logit."""

    log_probability: Tensor
    entropy: Tensor
    accuracy: Tensor


@dataclass(frozen=True, slots=True)
class _Targets:
    """The targets as columns, -1 for none; which tokens count; 1, or NaN where a target is no column; what wide logits
    are shifted by."""

    index: Tensor
    counts: Tensor
    poison: Tensor
    shift: Tensor | None = None


@overload
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = ..., *, return_metrics: Literal[True],
    ignore_index: int = ..., reduction: str = ..., label_smoothing: float = ..., z_loss: float = ...,
    softcap: float | None = ..., logit_scale: float | None = ..., token_weights: Tensor | None = ...,
    num_items_in_batch: Tensor | float | None = ..., memory: Memory = ...,
) -> tuple[Tensor, LossMetrics]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = ..., *, return_metrics: Literal[False] = ...,
    ignore_index: int = ..., reduction: str = ..., label_smoothing: float = ..., z_loss: float = ...,
    softcap: float | None = ..., logit_scale: float | None = ..., token_weights: Tensor | None = ...,
    num_items_in_batch: Tensor | float | None = ..., memory: Memory = ...,
) -> Tensor: ...  # fmt: skip
def linear_cross_entropy(  # noqa: PLR0913 - PyTorch's and transformers' own arguments
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    token_weights: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    return_metrics: bool = False,
    memory: Memory = "auto",
) -> Tensor | tuple[Tensor, LossMetrics]:
    """``F.cross_entropy(F.linear(x, weight, bias), targets)`` with what training loops put around it, in float32 from
    the GEMM's accumulator on.

    x is (..., features), targets (...) int32 or int64. Logits are scaled by ``logit_scale``, then capped:
    ``softcap * tanh(z / softcap)``. A token's loss is PyTorch's with ``label_smoothing``, plus ``z_loss`` times the
    square of its log-sum-exp, times its ``token_weights``. The mean divides by the sum of the weights that count, as
    PyTorch's does by class weights; with ``num_items_in_batch`` the losses are divided by that, whatever the reduction.
    A target that is no column and not ``ignore_index`` makes its loss and gradients NaN; CODETTA_CHECK=1 makes it an
    error.

    ``memory``: "fast" keeps logits for backward, or exponentials of them, "lean" keeps what costs nothing and computes
    the rest again; "auto" decides by the sizes and the device's memory."""
    _check(x, weight, targets, bias, token_weights, reduction)
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    if x.dtype != weight.dtype:
        raise TypeMismatch(f"linear_cross_entropy: x is {x.dtype}, weight {weight.dtype}", hint="one dtype for both")
    shape, tokens = targets.shape, targets.reshape(-1)
    found = _columns(tokens, weight.shape[0], ignore_index)
    names = [LSE, TARGET, *([TOTAL] if label_smoothing else []), *([LARGEST, UPPER, LOWER] if return_metrics else [])]
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    after = (1.0 if logit_scale is None else float(logit_scale), softcap)
    if head_ops.shifts(x.dtype):
        found = replace(found, shift=_shift(rows, weight, bias, found.index, after))
    values = _statistics(rows, weight, bias, found, after, names, memory)
    losses = _losses(values, found, label_smoothing, z_loss, weight.shape[0])
    counts = found.counts.to(losses.dtype)
    if token_weights is not None:
        counts = torch.where(found.counts, token_weights.reshape(-1).to(losses.dtype), 0.0)
    loss = _reduced(losses * counts, counts, reduction, num_items_in_batch, shape)
    return (loss, _metrics(values, found, shape)) if return_metrics else loss


def _check(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, token_weights: Tensor | None, reduction: str
) -> None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"linear_cross_entropy: x {list(x.shape)} with weight {list(weight.shape)}: features differ")
    if x.shape[:-1] != targets.shape:
        raise ShapeError(f"linear_cross_entropy: x {list(x.shape)} with targets {list(targets.shape)}: tokens differ")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"linear_cross_entropy: bias {list(bias.shape)} with weight {list(weight.shape)}")
    if token_weights is not None and token_weights.shape != targets.shape:
        raise ShapeError(f"linear_cross_entropy: token_weights {list(token_weights.shape)}, not {list(targets.shape)}")
    if targets.dtype not in (torch.int32, torch.int64):
        raise TypeMismatch(f"linear_cross_entropy: targets are {targets.dtype}", hint="int32 or int64")
    if x.dtype not in DTYPE_OF or not x.is_floating_point():
        raise TypeMismatch(f"linear_cross_entropy: x is {x.dtype}")
    if reduction not in REDUCTIONS:
        raise SettingsError(f"reduction={reduction!r}", hint=f"one of {', '.join(REDUCTIONS)}")


def _columns(targets: Tensor, columns: int, ignore_index: int) -> _Targets:
    inside, counts = (targets >= 0) & (targets < columns), targets != ignore_index
    wrong = counts & ~inside
    if head_ops.is_plain(wrong) and settings.checked() and bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        raise ShapeError(
            f"target {int(targets[first])} at token {first} is no column of a vocabulary of {columns}",
            hint=f"ignore_index={ignore_index} marks tokens without a target",
        )
    index = torch.where(inside & counts, targets, -1).to(torch.int32)
    return _Targets(index, counts, torch.where(wrong, torch.nan, 1.0))


def _shift(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, after: tuple[float, float | None]) -> Tensor:
    """About the logit of each row's target, as a constant: of none, that of the first column."""
    at, (scale, softcap) = index.clamp(min=0), after
    with torch.no_grad():
        z = (x * weight[at]).sum(1)
        z = (z if bias is None else z + bias[at]) * scale
        return z if softcap is None else softcap * torch.tanh(z / softcap)


def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: _Targets, after: tuple[float, float | None],
    names: list[str], memory: str,
) -> dict[str, Tensor]:  # fmt: skip
    lends = weight.requires_grad and torch.is_grad_enabled() and head_ops.is_plain(x, weight, bias)
    sizes = Sizes(x.shape[0], x.shape[1], weight.shape[0], x.dtype.itemsize)
    head = Head(x.shape[1], DTYPE_OF[x.dtype], None if bias is None else DTYPE_OF[bias.dtype], *after)
    what = What(*after, mode_of(head, tuple(names), sizes, memory, lends, x.device), lends)
    more = [t.contiguous() for t in (targets.shift, bias) if t is not None]
    ts = [x, weight.contiguous(), targets.index, *more]
    return dict(zip(names, torch.ops.codetta.head(ts, what.text, ",".join(names)), strict=True))


def mode_of(head: Head, names: tuple[str, ...], sizes: Sizes, memory: str, lends: bool, device: torch.device) -> str:
    """``fast`` or ``lean`` on that device, or instead of ``fast`` exponentials, which borrow nothing, where a head can
    be held so."""
    place = device.type, device.index or 0
    plain = suits(head, names, sizes) and _has_rows(*place)
    mode = choose(sizes, memory, lends and not plain, _device_bytes(*place))
    return EXPONENTIALS if mode == "fast" and plain else mode


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_rows(kind: str, index: int) -> bool:
    """Whether rows of exponentials are looked after without waiting for the device: not on a GPU without kernels."""
    return kind != "cuda" or why_not(torch.device(kind, index)) is None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_bytes(kind: str, index: int) -> int:
    """The memory of a GPU; 0 of what does not tell."""
    return torch.cuda.get_device_properties(index).total_memory if kind == "cuda" else 0


def _losses(values: dict[str, Tensor], targets: _Targets, smoothing: float, z_loss: float, columns: int) -> Tensor:
    """The loss of each token, 0 of an ignored one."""
    lse = values[LSE]
    loss = lse - values[TARGET]
    if smoothing:
        loss = (1.0 - smoothing) * loss + smoothing * (lse - values[TOTAL] / columns)
    if z_loss:
        loss = loss + z_loss * (lse if targets.shift is None else lse + targets.shift).square()
    return torch.where(targets.counts, loss * targets.poison, 0.0)


def _reduced(losses: Tensor, counts: Tensor, reduction: str, items: Tensor | float | None, shape: torch.Size) -> Tensor:
    loss = losses.reshape(shape) if reduction == "none" else losses.sum()
    if items is not None:
        return loss / (items.to(losses.device) if isinstance(items, Tensor) else items)
    return loss / counts.sum() if reduction == "mean" else loss


def _metrics(values: dict[str, Tensor], targets: _Targets, shape: torch.Size) -> LossMetrics:
    lse, target, largest, upper, lower = (values[n].detach() for n in (LSE, TARGET, LARGEST, UPPER, LOWER))
    log_probability = torch.where(targets.counts, (target - lse) * targets.poison, 0.0)
    mean = (upper - lse).exp() - (lower - lse).exp()
    hits = torch.where(targets.counts, (target >= largest) * targets.poison, 0.0)
    accuracy = hits.sum() / targets.counts.sum()
    return LossMetrics(log_probability.reshape(shape), (lse - mean).reshape(shape), accuracy)
