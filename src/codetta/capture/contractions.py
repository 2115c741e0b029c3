"""ATen's GEMMs, reductions, norms and losses as nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from codetta.capture.align import Value
from codetta.capture.layout import Atom, Dims, atoms, chain, product
from codetta.capture.scope import Meaning, Scope
from codetta.capture.sources import fake
from codetta.core.node import Node
from codetta.core.types import Kind
from codetta.errors import UnsupportedError
from codetta.ir import ops
from codetta.ir.build import (
    add,
    apply,
    div,
    logsumexp_row,
    matmul,
    mul,
    reduce,
    select_column,
    sub,
    sum_to,
    where,
)

aten = torch.ops.aten
Rule = Callable[..., Meaning]


# --- GEMMs ------------------------------------------------------------------------------------------------------------


def _rows_by_columns(s: Scope, x: Any) -> Value:
    """An activation whose last dimension is all of its columns."""
    v = s.activation(x)
    t = v.node.type
    if t.kind is not Kind.TILE or len(chain(v.dims, "column")) != 1 or not v.dims[-1]:
        raise UnsupportedError(f"a GEMM over {t}")
    if any(a.axis == "row" for a in v.dims[-1]) or len(atoms(v.dims[-1:], "column")) != 1:
        raise UnsupportedError("a GEMM over a part of the columns")
    return v


def gemm(s: Scope, x: Any, matrix: Any, *, transposed: bool) -> Value:
    """``x`` times a matrix, which ``transposed`` says to take as its transpose."""
    v = _rows_by_columns(s, x)
    w, flipped = s.weight(matrix)
    nt = flipped != transposed
    s.contracts = True
    found = matmul(v.node, w, "nt" if nt else "nn")
    cols = found.type.cols
    if not isinstance(cols, int):
        raise UnsupportedError(f"a GEMM with {cols} columns")
    return Value(found, (*v.dims[:-1], (Atom("column", cols, 1),)))


def _linear(s: Scope, x: Any, weight: Any, bias: Any) -> Value:
    product_ = gemm(s, x, weight, transposed=True)
    return product_ if bias is None else s.combine(add, product_, bias)


def _matmul(s: Scope, x: Any, matrix: Any) -> Value:
    return gemm(s, x, matrix, transposed=False)


def _addmm(s: Scope, bias: Any, x: Any, matrix: Any, beta: float, alpha: float) -> Value:
    if beta != 1 or alpha != 1:
        raise UnsupportedError("addmm with factors")
    return s.combine(add, gemm(s, x, matrix, transposed=False), bias)


# --- reductions -------------------------------------------------------------------------------------------------------


def reduced(v: Value, at: Sequence[int], fn: str) -> Value:
    """``fn`` over some dimensions, which stay with size 1."""
    gone = {i % len(v.dims) for i in at}
    kept = tuple(() if i in gone else d for i, d in enumerate(v.dims))
    kind = _kept_kind(v, kept)
    if kind is v.node.type.kind:
        return Value(v.node, kept)
    if kind is not Kind.GROUPVEC:
        steps = [Kind.COLVEC, Kind.SCALAR] if kind is Kind.SCALAR and v.node.type.kind is Kind.TILE else [kind]
        n = v.node
        for step in steps:
            n = reduce(n, fn, step)
        return Value(n, kept)
    inside = product(a.size for a in chain(tuple(v.dims[i] for i in gone), "column"))
    groups = [a for a in chain(v.dims, "column") if a in atoms(kept, "column")]
    count = product(a.size for a in groups)
    if not isinstance(inside, int) or not isinstance(count, int):
        raise UnsupportedError("a reduction over an unknown number of columns")
    return Value(reduce(v.node, fn, Kind.GROUPVEC, count), _by_group(kept, inside))


def _kept_kind(v: Value, kept: Dims) -> Kind:
    """The kind of a reduction that leaves these dimensions."""
    had_rows, rows = atoms(v.dims, "row"), atoms(kept, "row")
    had_columns, columns = atoms(v.dims, "column"), atoms(kept, "column")
    if len(rows) not in (0, len(had_rows)):
        raise UnsupportedError("a reduction over a part of the rows")
    if len(columns) == len(had_columns):
        if len(rows) == len(had_rows):
            return v.node.type.kind
        if v.node.type.kind is Kind.TILE:
            return Kind.ROWVEC
    if not columns:
        return Kind.COLVEC if rows else Kind.SCALAR
    if rows and v.node.type.kind is Kind.TILE:
        return Kind.GROUPVEC
    raise UnsupportedError(f"a reduction of a part of {v.node.type}")


def _by_group(dims: Dims, inside: int) -> Dims:
    """Dimensions of groups, counted in groups."""

    def fit(a: Atom) -> Atom:
        if a.axis == "row":
            return a
        if not isinstance(a.stride, int) or a.stride % inside:
            raise UnsupportedError("a reduction over columns that are not the inside of groups")
        return Atom(a.axis, a.size, a.stride // inside)

    return tuple(tuple(fit(a) for a in d) for d in dims)


def mean(v: Value, at: Sequence[int]) -> Value:
    """The mean over some dimensions of columns, which stay with size 1."""
    gone = tuple(v.dims[i] for i in {i % len(v.dims) for i in at})
    count = product(a.size for d in gone for a in d)
    if atoms(gone, "row") or not isinstance(count, int) or count == 0:
        raise UnsupportedError("a mean over rows, whose number a segment does not know")
    if count == 1:  # what a norm of it keeps is a sign, which cancels exactly where nothing is rounded in between
        raise UnsupportedError("a mean over a single column")
    total = reduced(v, at, "sum")
    return Value(mul(total.node, 1.0 / count), total.dims)


def _dropped(v: Value, at: Sequence[int], keepdim: bool) -> Value:
    gone = set() if keepdim else {i % len(v.dims) for i in at}
    return Value(v.node, tuple(d for i, d in enumerate(v.dims) if i not in gone))


def _fold(fn: str) -> Rule:
    def rule(s: Scope, x: Any, dim: Sequence[int] | None, keepdim: bool) -> Value:
        v = s.activation(x)
        at = list(dim) if dim else list(range(len(v.dims)))
        return _dropped(reduced(v, at, fn), at, keepdim)

    return rule


def _mean(s: Scope, x: Any, dim: Sequence[int] | None, keepdim: bool) -> Value:
    v = s.activation(x)
    at = list(dim) if dim else list(range(len(v.dims)))
    return _dropped(mean(v, at), at, keepdim)


def _sum_all(s: Scope, x: Any) -> Value:
    v = s.activation(x)
    return Value(reduced(v, range(len(v.dims)), "sum").node, ())


# --- norms ------------------------------------------------------------------------------------------------------------


def _rms_norm(s: Scope, x: Any, shape: Sequence[int], weight: Any, eps: float | None) -> Value:
    v, at = s.activation(x), range(-len(shape), 0)
    if eps is None:  # PyTorch takes that of the dtype in which it computes
        eps = torch.finfo(torch.float64 if fake(x).dtype is torch.float64 else torch.float32).eps
    square = mean(Value(mul(v.node, v.node), v.dims), at)
    found = s.combine(lambda a, r: mul(a, apply(ops.RSQRT, add(r, eps))), v, square)
    return found if weight is None else s.combine(mul, found, weight)


def _layer_norm(s: Scope, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float, _: bool) -> Value:
    v, at = s.activation(x), range(-len(shape), 0)
    centred = s.combine(sub, v, mean(v, at))
    variance = mean(Value(mul(centred.node, centred.node), centred.dims), at)
    found = s.combine(lambda a, r: mul(a, apply(ops.RSQRT, add(r, eps))), centred, variance)
    found = found if weight is None else s.combine(mul, found, weight)
    return found if bias is None else s.combine(add, found, bias)


# --- losses -----------------------------------------------------------------------------------------------------------


def _cross_entropy(s: Scope, x: Any, target: Any, weight: Any, reduction: int, ignore: int, smoothing: float) -> Value:
    if weight is not None or smoothing != 0 or fake(target).is_floating_point():
        raise UnsupportedError("a cross-entropy with class weights, label smoothing or target probabilities")
    v = _as_stored(_rows_by_columns(s, x))
    if len(v.dims) != 2:
        raise UnsupportedError("a cross-entropy whose classes are not the last dimension")
    classes = v.node.type.cols
    if not isinstance(classes, int):
        raise UnsupportedError("a cross-entropy over a number of classes that is only known at run time")
    lse = Value(logsumexp_row(v.node), v.dims[:-1])

    def of_token(total: Node, index: Node) -> Node:
        # a target that names no class gives NaN, never a plausible loss: a segment cannot raise as PyTorch does
        named = apply(ops.AND, apply(ops.GE, index, 0), apply(ops.LT, index, classes))
        loss = where(named, sub(total, select_column(v.node, index)), math.nan)
        return where(apply(ops.NE, index, ignore), loss, 0.0)

    losses = s.combine(of_token, lse, target)
    if reduction == 0:
        return losses
    if losses.node.type.kind is not Kind.COLVEC:
        raise UnsupportedError(f"targets that are a {losses.node.type}")
    total = sum_to(losses.node, Kind.SCALAR)
    if reduction == 2:
        return Value(total, ())
    counted = s.combine(lambda _, index: where(apply(ops.NE, index, ignore), 1.0, 0.0), lse, target)
    return Value(_mean_of(total, sum_to(counted.node, Kind.SCALAR)), ())


def _as_stored(v: Value) -> Value:
    """A value before it was widened: the loss is of the logits as they are stored, rounded."""
    n = v.node
    while n.op is ops.CAST and n.args[0].type.dtype.is_float and n.args[0].type.dtype.bytes < n.type.dtype.bytes:
        n = n.args[0]
    return Value(n, v.dims)


def _mean_of(total: Node, count: Node) -> Node:
    """total / count. Where nothing counts it is NaN as in PyTorch, and its gradient is 0 and never 0 * infinity."""
    return where(apply(ops.GT, count, 0.0), div(total, apply(ops.MAXIMUM, count, 1.0)), div(count, count))


CONTRACTIONS: dict[Any, Rule] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.sum.dim_IntList: _fold("sum"),
    aten.sum.default: _sum_all,
    aten.amax.default: _fold("max"),
    aten.mean.dim: _mean,
    aten.rms_norm.default: _rms_norm,
    aten.layer_norm.default: _layer_norm,
    aten.cross_entropy_loss.default: _cross_entropy,
}
