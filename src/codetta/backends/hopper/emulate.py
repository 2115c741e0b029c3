"""The generated source on torch tensors: the same text that becomes a kernel, run where there is no GPU.

What it shows is the lowering: names bound to the right columns, lanes, reductions. Needs neither QuACK nor CuTe DSL."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.hopper.lowered import Lowered, Operand, Sink
from codetta.backends.reference.evaluate import uniform


def _of_numbers(f: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    """A function of tensors that takes plain numbers, too."""
    return lambda x: f(x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64))


NAMES: dict[str, Any] = {
    **{name: _of_numbers(getattr(torch, name)) for name in ("abs", "exp", "log", "tanh", "erf", "sqrt", "rsqrt")},
    **{name: _of_numbers(getattr(torch, name)) for name in ("sin", "cos", "sigmoid")},
    **{name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "logical_not")},
    **{name: getattr(torch, name) for name in ("logical_and", "logical_or", "inf", "nan")},
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "maximum": lambda a, b: torch.maximum(*_tensors(a, b)),
    "minimum": lambda a, b: torch.minimum(*_tensors(a, b)),
    "where": lambda c, a, b: torch.where(torch.as_tensor(c), *_tensors(a, b)),
    "round_bf16": lambda x: x.bfloat16().to(x.dtype),
    "round_f16": lambda x: x.half().to(x.dtype),
    "pack": lambda a, b: (a, b),
}


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else torch.as_tensor(b)
    return torch.as_tensor(a, dtype=like.dtype), torch.as_tensor(b, dtype=like.dtype)


def emulate(lowered: Lowered, acc: Tensor, params: Sequence[Tensor]) -> dict[int, Tensor]:
    """The outputs by position, from an accumulator (M, N) and the program's parameters (the first is not read).

    All in the accumulator's dtype; nothing is rounded to a store's; reductions are whole."""
    returned: dict[str, Any] = {}
    wide = [p.to(acc.dtype) if p.is_floating_point() else p for p in params]
    function = _function(lowered.source, "epilogue")
    statistics = _statistics(lowered, acc, wide)
    for columns, accumulator in _visits(lowered, acc):
        loads = {o.name: _load(lowered, o, wide[o.param], columns, acc.shape[0]) for o in lowered.operands}
        groups = {s.name: statistics[s.name][:, columns // s.inside] for s in lowered.statistics}
        for name, value in function(*accumulator, **loads, **groups).items():
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
        value = _whole(factors, acc, order, lowered)
        _put(outputs, sink.output, _reduced(sink, value[:, slice(*sink.source)] if sink.source else value, params))
    for group in lowered.groups:
        value = statistics[group.statistic]
        inside = acc.shape[1] // value.shape[1]
        first, last = (c // inside for c in group.source or (0, acc.shape[1]))
        outputs[group.output] = value[:, first:last]
    return outputs


def _function(source: str, name: str) -> Callable[..., Mapping[str, Any]]:
    scope = dict(NAMES)
    exec(compile(source, "<epilogue>", "exec"), scope)
    function: Callable[..., Mapping[str, Any]] = scope[name]
    return function


def _statistics(lowered: Lowered, acc: Tensor, params: Sequence[Tensor]) -> dict[str, Tensor]:
    """The values (M, groups) of the reductions inside groups."""
    if not lowered.statistics:
        return {}
    function, every = _function(lowered.prepass, "prepass"), torch.arange(acc.shape[1])
    taken = inspect.signature(function).parameters
    loads = {
        o.name: _load(lowered, o, params[o.param], every, acc.shape[0]) for o in lowered.operands if o.name in taken
    }
    found = {}
    for s, value in zip(lowered.statistics, function(acc, **loads).values(), strict=True):
        grouped = value.expand(acc.shape).unflatten(1, (-1, s.inside))
        total = grouped.sum(2) if s.kind == "sum" else grouped.amax(2)
        found[s.name] = eval(s.finish, NAMES, {"total": total})
    return found


def _visits(lowered: Lowered, acc: Tensor) -> list[tuple[Tensor, tuple[Any, ...]]]:
    """The calls of the function: the accumulator's columns that each is for, and its first arguments."""
    every = torch.arange(acc.shape[1])
    if lowered.mode == "element":
        return [(every, (acc,))]
    if lowered.mode == "pair":
        return [(every, ((acc[:, : lowered.half], acc[:, lowered.half :]),))]
    lanes = [every[(every // lowered.half) % 2 == lane] for lane in (0, 1)]
    return [(lanes[i], (acc[:, lanes[i]], acc[:, lanes[1 - i]], i)) for i in (0, 1)]


def _load(lowered: Lowered, o: Operand, value: Tensor, columns: Tensor, rows: int) -> Any:
    if o.kind == "scalar":
        return value
    if o.kind == "col":
        return value.unsqueeze(1)
    if o.kind == "hit":
        return columns == value.unsqueeze(1)
    if o.kind == "random":
        return uniform(value, torch.arange(rows).unsqueeze(1), columns)
    if o.columns:
        value = value[..., slice(*o.columns)]
    if o.source and o.kind != "group":
        value = F.pad(value, (o.source[0], lowered.cols - o.source[1]))
    if lowered.mode == "pair":
        return value[..., : lowered.half], value[..., lowered.half :]
    if o.lanes:
        own = (columns // lowered.half) % 2
        first = columns - own * lowered.half
        return value[first], value[first + lowered.half]
    if o.kind == "group":
        start, stop = o.source or (0, lowered.cols)
        inside = (columns >= start) & (columns < stop)
        return torch.where(inside, value[:, torch.where(inside, columns - start, 0) // o.inside], 0.0)
    if o.kind == "table":
        columns = (columns // 2 if o.spread else columns) % o.inside
    return value[..., columns]


def _whole(values: list[Any], acc: Tensor, order: Tensor, lowered: Lowered) -> Tensor:
    """The values of all calls, as one (M, columns) tensor in the order of columns."""
    flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    width = acc.shape[1] // (2 if lowered.mode != "element" else 1)
    whole = torch.cat([torch.as_tensor(v, dtype=acc.dtype).expand(acc.shape[0], width) for v in flat], 1)
    return whole[:, order] if lowered.by_lane else whole


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
