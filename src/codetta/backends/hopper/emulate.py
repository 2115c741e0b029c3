"""The generated source on torch tensors: the same text that becomes a kernel, run where there is no GPU.

What it shows is the lowering: names bound to the right columns, lanes, reductions. Needs neither QuACK nor CuTe DSL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.hopper.lowered import Lowered, Operand, Sink

NAMES: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("abs", "exp", "log", "tanh", "erf", "sqrt", "rsqrt", "sin", "cos")},
    **{name: getattr(torch, name) for name in ("sigmoid", "eq", "ne", "lt", "le", "gt", "ge", "logical_not")},
    **{name: getattr(torch, name) for name in ("logical_and", "logical_or", "inf", "nan")},
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "maximum": lambda a, b: torch.maximum(*_tensors(a, b)),
    "minimum": lambda a, b: torch.minimum(*_tensors(a, b)),
    "where": torch.where,
    "round_bf16": lambda x: x.bfloat16().to(x.dtype),
    "round_f16": lambda x: x.half().to(x.dtype),
    "pack": lambda a, b: (a, b),
}


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    return torch.as_tensor(a, dtype=like.dtype), torch.as_tensor(b, dtype=like.dtype)


def emulate(lowered: Lowered, acc: Tensor, params: Sequence[Tensor]) -> dict[int, Tensor]:
    """The outputs by position, from an accumulator (M, N) and the program's parameters (the first is not read).

    All in the accumulator's dtype; nothing is rounded to a store's; reductions are whole."""
    returned: dict[str, Any] = {}
    wide = [p.to(acc.dtype) if p.is_floating_point() else p for p in params]
    function = _function(lowered)
    for columns, accumulator in _visits(lowered, acc):
        loads = {o.name: _load(lowered, o, wide[o.param], columns) for o in lowered.operands}
        for name, value in function(*accumulator, **loads).items():
            returned.setdefault(name, []).append(value)
    order = torch.cat([columns for columns, _ in _visits(lowered, acc)]).argsort()
    outputs: dict[int, Tensor] = {}
    for store in lowered.stores:
        value = _whole(returned[store.name], acc, order, lowered)
        _put(outputs, store.output, value[:, slice(*store.source)] if store.source else value)
    for sink in lowered.sinks:
        factors = returned[sink.name]
        if sink.factors:
            factors = [a * b for a, b in factors]
        _put(outputs, sink.output, _reduced(sink, _whole(factors, acc, order, lowered), params))
    return outputs


def _function(lowered: Lowered) -> Callable[..., Mapping[str, Any]]:
    scope = dict(NAMES)
    exec(compile(lowered.source, "<epilogue>", "exec"), scope)
    function: Callable[..., Mapping[str, Any]] = scope["epilogue"]
    return function


def _visits(lowered: Lowered, acc: Tensor) -> list[tuple[Tensor, tuple[Any, ...]]]:
    """The calls of the function: the accumulator's columns that each is for, and its first arguments."""
    every = torch.arange(acc.shape[1])
    if lowered.mode == "element":
        return [(every, (acc,))]
    if lowered.mode == "pair":
        return [(every, ((acc[:, : lowered.half], acc[:, lowered.half :]),))]
    lanes = [every[(every // lowered.half) % 2 == lane] for lane in (0, 1)]
    return [(lanes[i], (acc[:, lanes[i]], acc[:, lanes[1 - i]], i)) for i in (0, 1)]


def _load(lowered: Lowered, o: Operand, value: Tensor, columns: Tensor) -> Any:
    if o.kind == "scalar":
        return value
    if o.kind == "col":
        return value.unsqueeze(1)
    if o.columns:
        value = value[..., slice(*o.columns)]
    if lowered.mode == "pair":
        return value[..., : lowered.half], value[..., lowered.half :]
    return value[..., columns % o.inside if o.kind == "table" else columns]


def _whole(values: list[Any], acc: Tensor, order: Tensor, lowered: Lowered) -> Tensor:
    """The values of all calls, as one (M, columns) tensor in the order of columns."""
    flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    width = acc.shape[1] // (2 if lowered.mode != "element" else 1)
    whole = torch.cat([torch.as_tensor(v, dtype=acc.dtype).expand(acc.shape[0], width) for v in flat], 1)
    return whole[:, order] if lowered.mode == "halves" else whole


def _put(outputs: dict[int, Tensor], at: int, value: Tensor) -> None:
    """An output that is written in lanes is the lanes side by side."""
    outputs[at] = torch.cat([outputs[at], value], -1) if at in outputs else value


def _reduced(sink: Sink, value: Tensor, params: Sequence[Tensor]) -> Tensor:
    if sink.kind == "lse":
        return torch.logsumexp(value, 1)
    if sink.kind == "select":
        index = params[sink.index]
        inside = (index >= 0) & (index < value.shape[1])
        found = value.gather(1, torch.where(inside, index, 0).long().unsqueeze(1)).squeeze(1)
        return torch.where(inside, found, 0.0)
    dim = 0 if sink.over_rows else 1
    fold = sink.kind.partition("_")[2]
    return value.sum(dim) if fold == "sum" else (value.abs() if fold == "absmax" else value).amax(dim)
