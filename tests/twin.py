"""The same value twice: a node of ours, and a plain float64 tensor under autograd. The oracle of the tests.

Nothing here uses codetta's evaluator: the tensors are made with PyTorch's own operators, next to the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.core.node import Node, Op
from codetta.core.types import DType, Kind, Sym, Type, f64
from codetta.ir import build, ops
from codetta.ir.split import Split


@dataclass(frozen=True, eq=False)
class Twin:
    """A node and its value."""

    node: Node
    value: Tensor

    @property
    def kind(self) -> Kind:
        return self.node.type.kind

    @property
    def cols(self) -> int:
        cols = self.node.type.cols
        assert isinstance(cols, int)
        return cols

    def __add__(self, other: Twin | float) -> Twin:
        return add(self, other)

    def __sub__(self, other: Twin | float) -> Twin:
        return sub(self, other)

    def __mul__(self, other: Twin | float) -> Twin:
        return mul(self, other)

    def __neg__(self) -> Twin:
        return neg(self)


def shape(t: Type, rows: int) -> list[int]:
    """The tensor shape of a type when the row symbol stands for ``rows``."""
    sizes = (t.rows, t.cols)
    return [int(s.scale * rows) if isinstance(s, Sym) else s for s in sizes if s is not None]


def leaf(name: str, type_: Type, value: Tensor) -> Twin:
    """An input; a floating one asks for its gradient."""
    return Twin(build.input_(name, type_), value.requires_grad_() if type_.dtype.is_float else value)


# --- broadcasting: everything at full size --------------------------------------------------------------------------


def full(t: Twin | float, rows: int, cols: int) -> Tensor:
    """The value repeated to (rows, cols)."""
    if not isinstance(t, Twin):
        return torch.full((rows, cols), t, dtype=torch.float64)
    v = t.value
    match t.kind:
        case Kind.TILE:
            return v
        case Kind.ROWVEC:
            return v[None, :].expand(rows, cols)
        case Kind.COLVEC:
            return v[:, None].expand(rows, cols)
        case Kind.GROUPVEC:
            return v.repeat_interleave(cols // v.shape[1], 1)
        case Kind.TABLE:
            return v.repeat(1, cols // v.shape[1])
        case Kind.SCALAR:
            return v.expand(rows, cols)


def at(t: Twin | float, out: Type, rows: int) -> Tensor:
    """The value repeated to the shape of ``out``."""
    if out.kind is Kind.TILE:
        assert isinstance(out.cols, int)
        return full(t, rows if isinstance(out.rows, Sym) else int(out.rows or 0), out.cols)
    if not isinstance(t, Twin):
        return torch.full(shape(out, rows), t, dtype=torch.float64)
    if t.kind is Kind.COLVEC and out.kind in (Kind.GROUPVEC, Kind.TABLE):
        return t.value[:, None].expand(shape(out, rows))
    return t.value.expand(shape(out, rows))


def elementwise(op: Op, fn: Callable[..., Tensor]) -> Callable[..., Twin]:
    """The builder of an elementwise map."""

    def made(*args: Twin | float) -> Twin:
        n = build.apply(op, *(a.node if isinstance(a, Twin) else a for a in args))
        return Twin(n, fn(*(at(a, n.type, rows_of(*args)) for a in args)))

    return made


def rows_of(*args: Twin | float) -> int:
    """The row count of the first value that has symbolic rows."""
    return next((a.value.shape[0] for a in args if isinstance(a, Twin) and isinstance(a.node.type.rows, Sym)), 0)


UNARY: dict[Op, Callable[[Tensor], Tensor]] = {
    ops.NEG: torch.neg,
    ops.ABS: torch.abs,
    ops.EXP: torch.exp,
    ops.LOG: torch.log,
    ops.TANH: torch.tanh,
    ops.ERF: torch.erf,
    ops.SQRT: torch.sqrt,
    ops.RSQRT: torch.rsqrt,
    ops.RECIP: torch.reciprocal,
    ops.SIN: torch.sin,
    ops.COS: torch.cos,
    ops.SIGMOID: torch.sigmoid,
    ops.SILU: F.silu,
    ops.GELU: F.gelu,
    ops.GELU_TANH: partial(F.gelu, approximate="tanh"),
}
BINARY: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    ops.ADD: torch.add,
    ops.SUB: torch.sub,
    ops.MUL: torch.mul,
    ops.DIV: torch.div,
    ops.MAXIMUM: torch.maximum,
    ops.MINIMUM: torch.minimum,
}
MAPS = {op: elementwise(op, fn) for op, fn in (UNARY | BINARY).items()}
add, sub, mul, div, neg = (MAPS[op] for op in (ops.ADD, ops.SUB, ops.MUL, ops.DIV, ops.NEG))
tanh, silu, sigmoid, gelu, rsqrt = (MAPS[op] for op in (ops.TANH, ops.SILU, ops.SIGMOID, ops.GELU, ops.RSQRT))
sqrt, recip = MAPS[ops.SQRT], MAPS[ops.RECIP]


def positive(t: Twin, other: Twin | float, a: Twin | float, b: Twin | float) -> Twin:
    """``a`` where ``t > other``, else ``b``."""
    condition = build.apply(ops.GT, t.node, other.node if isinstance(other, Twin) else other)
    n = build.where(condition, *(x.node if isinstance(x, Twin) else x for x in (a, b)))
    rows = rows_of(t, other, a, b)
    hit = at(t, n.type, rows) > at(other, n.type, rows)
    return Twin(n, torch.where(hit, at(a, n.type, rows), at(b, n.type, rows)))


def cast(t: Twin, dtype: DType) -> Twin:
    """The node is cast; the oracle stays in float64."""
    return Twin(build.cast(t.node, dtype), t.value)


def expand(t: Twin, like: Type, rows: int) -> Twin:
    """The value repeated to the shape of ``like``."""
    return Twin(build.expand(t.node, like), at(t, like, rows))


# --- columns, reductions, contractions ------------------------------------------------------------------------------


def indices(split: Split, cols: int) -> list[Tensor]:
    """For each part of a split, the columns that it takes."""
    every = torch.arange(cols)
    if split.adjacent:
        return [every[0::2], every[1::2]]
    grouped = every.reshape(split.groups, cols // split.groups)
    sizes = list(split.sizes or [grouped.shape[1] // split.parts] * split.parts)
    return [p.reshape(-1) for p in grouped.split(sizes, 1)]


def part(t: Twin, split: Split, index: int) -> Twin:
    """Part ``index`` of the columns."""
    return Twin(build.part(t.node, split, index), t.value[:, indices(split, t.cols)[index]])


def parts(t: Twin, split: Split) -> list[Twin]:
    """All parts of the columns."""
    return [part(t, split, i) for i in range(split.parts)]


def join(split: Split, *args: Twin | float) -> Twin:
    """Columns put together; a number stands for a part of that number."""
    n = build.join(split, *(a.node if isinstance(a, Twin) else a for a in args))
    assert isinstance(n.type.cols, int)
    where = indices(split, n.type.cols)
    rows = rows_of(*args)
    wide = [
        a.value if isinstance(a, Twin) else torch.full((rows, len(i)), a, dtype=torch.float64)
        for a, i in zip(args, where, strict=True)
    ]
    order = torch.cat(where).argsort()
    return Twin(n, torch.cat(wide, 1)[:, order])


FOLDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda v, dim: v.sum(dim),
    "max": lambda v, dim: v.amax(dim),
    "absmax": lambda v, dim: v.abs().amax(dim),
}


def reduce(t: Twin, fn: str, to: Kind, groups: int | None = None) -> Twin:
    """``fn`` over the axes that ``to`` lacks."""
    v, fold = t.value, FOLDS[fn]
    if to is Kind.SCALAR:
        out = fold(v.reshape(-1), 0)
    elif to in (Kind.GROUPVEC, Kind.TABLE):
        assert groups is not None
        grouped = v.reshape(v.shape[0], groups, v.shape[1] // groups)
        out = fold(grouped, 2 if to is Kind.GROUPVEC else 1)
    else:
        out = fold(v, 1 if to is Kind.COLVEC else 0)
    return Twin(build.reduce(t.node, fn, to, groups), out)


def sum_row(t: Twin) -> Twin:
    """One sum per row."""
    return reduce(t, "sum", Kind.COLVEC)


def sum_col(t: Twin) -> Twin:
    """One sum per column."""
    return reduce(t, "sum", Kind.ROWVEC)


def matmul(a: Twin, b: Twin, form: str = "nt") -> Twin:
    """The GEMM of a form."""
    x, w = a.value, b.value
    out = {"nt": lambda: x @ w.T, "nn": lambda: x @ w, "tn": lambda: x.T @ w}[form]()
    return Twin(build.matmul(a.node, b.node, form), out)


def logsumexp_row(t: Twin) -> Twin:
    """log(sum(exp)) of each row."""
    return Twin(build.logsumexp_row(t.node), t.value.logsumexp(1))


def select_column(t: Twin, index: Twin) -> Twin:
    """The element of each row at the column that the index names; 0 where it names none."""
    v, i = t.value, index.value.long()
    inside = (i >= 0) & (i < v.shape[1])
    picked = v[torch.arange(v.shape[0]), torch.where(inside, i, 0)]
    return Twin(build.select_column(t.node, index.node), torch.where(inside, picked, torch.zeros_like(picked)))


# --- norms ----------------------------------------------------------------------------------------------------------


def rms_norm(x: Twin, gain: Twin | None, dtype: DType = f64) -> Twin:
    """RMSNorm, spelled as a model does: statistic of x, scale, round, gain."""
    r = rsqrt(sum_row(x * x) * (1 / x.cols) + 1e-5)
    h = cast(x * r, dtype)
    return h if gain is None else cast(gain * h, dtype)


def layer_norm(x: Twin, gain: Twin | None, bias: Twin | None, dtype: DType = f64) -> Twin:
    """LayerNorm in two passes: mean, centred squares."""
    d = x - sum_row(x) * (1 / x.cols)
    h = d * rsqrt(sum_row(d * d) * (1 / x.cols) + 1e-5)
    h = h if gain is None else h * gain
    return cast(h if bias is None else h + bias, dtype)


# --- comparing ------------------------------------------------------------------------------------------------------


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, or the plain norm of the difference where there is nothing."""
    want = want.detach().double()
    size = want.norm().item()
    return (got.detach().double() - want).norm().item() / (size or 1.0)
