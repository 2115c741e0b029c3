"""What a graph means in plain float64 PyTorch, under autograd: the oracle of the core's tests.

It shares nothing with the backends. Every op is said a second time, as simply as can be: each value of a map is
repeated to its full size first, parts of columns are lists of indices, casts to narrower floats are widened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.core.node import Node, Op, postorder
from codetta.core.types import Dim, Kind, Sym, Type
from codetta.ir import ops
from codetta.ir.graph import Graph
from codetta.ir.split import Split

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
MAPS: dict[Op, Callable[..., Tensor]] = {
    **UNARY,
    ops.ADD: torch.add,
    ops.SUB: torch.sub,
    ops.MUL: torch.mul,
    ops.DIV: torch.div,
    ops.MAXIMUM: torch.maximum,
    ops.MINIMUM: torch.minimum,
    ops.FLOORDIV: partial(torch.div, rounding_mode="floor"),
    ops.MOD: torch.remainder,
    ops.EQ: torch.eq,
    ops.NE: torch.ne,
    ops.LT: torch.lt,
    ops.LE: torch.le,
    ops.GT: torch.gt,
    ops.GE: torch.ge,
    ops.AND: torch.logical_and,
    ops.OR: torch.logical_or,
    ops.NOT: torch.logical_not,
    ops.WHERE: lambda condition, a, b: torch.where(condition != 0, a, b),
}
FOLDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda v, dim: v.sum(dim),
    "max": lambda v, dim: v.amax(dim),
    "absmax": lambda v, dim: v.abs().amax(dim),
}
CONTRACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nt": lambda a, b: a @ b.T,
    "nn": lambda a, b: a @ b,
    "tn": lambda a, b: a.T @ b,
}
Feed = dict[str, Tensor]


def name(n: Node) -> str:
    """The name of an input."""
    return str(n.attrs[0])


def size(d: Dim | None, rows: int) -> int:
    """A size as a number."""
    return int(d.scale * rows) if isinstance(d, Sym) else d or 0


def shape(t: Type, rows: int) -> list[int]:
    """The tensor shape of a type when the row symbol stands for ``rows``."""
    return [size(d, rows) for d in (t.rows, t.cols) if d is not None]


def random_feed(graph: Graph, rows: int, seed: int = 0) -> Feed:
    """Normally distributed values that ask for a gradient, representable in the inputs' dtypes; small integers, which
    mostly name a column; what is called r is positive, as a row scale is."""
    generator = torch.Generator().manual_seed(seed)
    found: Feed = {}
    for n in graph.inputs:
        sizes = shape(n.type, rows)
        if not n.type.dtype.is_float:
            found[name(n)] = torch.randint(-1, 5, sizes, generator=generator)
            continue
        value = torch.randn(sizes, generator=generator, dtype=torch.float64)
        value = value.abs() + 0.5 if name(n).startswith("r") else value
        narrow = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}.get(n.type.dtype.name)
        found[name(n)] = (value if narrow is None else value.to(narrow).double()).requires_grad_()
    return found


def random_cotangents(outputs: Mapping[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Random incoming gradients, one an output."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in outputs.items()}


def outputs(graph: Graph, feed: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The outputs by name."""
    made: dict[Node, Tensor] = {}
    for n in postorder(graph.roots):
        made[n] = feed[name(n)] if n.op is ops.INPUT else _value(n, [made[a] for a in n.args], rows)
    return {key: made[n] for key, n in graph.outputs}


def gradients(
    found: Mapping[str, Tensor], feed: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], wrt: Iterable[str]
) -> dict[str, Tensor | None]:
    """The gradients by the named inputs of the outputs weighted with cotangents, as autograd finds them."""
    names = list(wrt)
    active = [n for n, t in found.items() if t.requires_grad and n in cotangents]
    given = [cotangents[n].double() for n in active]
    if not active or not names:
        return dict.fromkeys(names)
    sources = [feed[n] for n in names]
    got = torch.autograd.grad([found[n] for n in active], sources, given, allow_unused=True)
    return dict(zip(names, got, strict=True))


def indices(split: Split, cols: int) -> list[Tensor]:
    """For each part of a split, the columns that it takes."""
    every = torch.arange(cols)
    if split.adjacent:
        return [every[0::2], every[1::2]]
    grouped = every.reshape(split.groups, cols // split.groups)
    sizes = list(split.sizes or [grouped.shape[1] // split.parts] * split.parts)
    return [p.reshape(-1) for p in grouped.split(sizes, 1)]


def repeated(v: Tensor, t: Type, out: Type, rows: int) -> Tensor:
    """A value repeated to the full size of ``out``."""
    v = v if v.is_floating_point() else v.double()
    to = shape(out, rows)
    if t.kind is Kind.COLVEC and len(to) == 2:
        v = v[:, None]
    if out.kind is Kind.TILE and t.kind is Kind.GROUPVEC:
        v = v.repeat_interleave(to[1] // v.shape[1], 1)
    if out.kind is Kind.TILE and t.kind is Kind.TABLE:
        v = v.repeat(1, to[1] // v.shape[1])
    return v.expand(to)


def _value(n: Node, args: list[Tensor], rows: int) -> Tensor:
    if n.op in WHOLE:
        return WHOLE[n.op](n, rows, *args)
    types = [a.type for a in n.args]
    return MAPS[n.op](*(repeated(a, t, n.type, rows) for a, t in zip(args, types, strict=True)))


def _columns(whole: Node, n: Node, rows: int) -> list[Tensor]:
    split = n.attrs[0]
    assert isinstance(split, Split)
    return indices(split, size(whole.type.cols, rows))


def _part(n: Node, rows: int, v: Tensor) -> Tensor:
    return v[..., _columns(n.args[0], n, rows)[n.attrs[1]]]  # type: ignore[index]


def _join(n: Node, rows: int, *args: Tensor) -> Tensor:
    where = _columns(n, n, rows)
    lead = shape(n.type, rows)[:-1]
    wide = [a.expand(*lead, len(i)) for a, i in zip(args, where, strict=True)]
    return torch.cat(wide, -1)[..., torch.cat(where).argsort()]


def _stack(n: Node, rows: int, *args: Tensor) -> Tensor:
    sizes = [s for s in n.attrs if isinstance(s, int)]
    return torch.cat([a.expand(s, size(n.type.cols, rows)) for a, s in zip(args, sizes, strict=True)])


def _reduce(n: Node, rows: int, v: Tensor) -> Tensor:
    fn, to, groups = n.attrs
    fold = FOLDS[str(fn)]
    if to is Kind.SCALAR:
        return fold(v.reshape(-1), 0)
    if not isinstance(groups, int):
        return fold(v, 0 if to is Kind.ROWVEC else 1)
    grouped = v.reshape(v.shape[0], groups, v.shape[1] // groups)
    return fold(grouped, 2 if to is Kind.GROUPVEC else 1)


def _select(n: Node, rows: int, v: Tensor, index: Tensor) -> Tensor:
    """0 where the index names no column."""
    inside = (index >= 0) & (index < v.shape[1])
    picked = v[torch.arange(v.shape[0]), torch.where(inside, index, 0).long()]
    return torch.where(inside, picked, 0.0)


def _index(n: Node, rows: int) -> Tensor:
    count = n.attrs[0]
    return torch.arange(size(count if isinstance(count, int | Sym) else None, rows))


WHOLE: dict[Op, Callable[..., Tensor]] = {  # the node, what M stands for, and the arguments' values
    ops.CONST: lambda n, rows: torch.tensor(n.attrs[0], dtype=torch.float64),
    ops.COLUMN: _index,
    ops.ROW: _index,
    ops.CAST: lambda n, rows, v: v if n.type.dtype.is_float else v.trunc(),
    ops.EXPAND: lambda n, rows, v: repeated(v, n.args[0].type, n.type, rows),
    ops.PART: _part,
    ops.JOIN: _join,
    ops.TURN: lambda n, rows, v: v,
    ops.STACK: _stack,
    ops.TAKE_ROWS: lambda n, rows, v: v[n.attrs[0] : n.attrs[1]],
    ops.REDUCE: _reduce,
    ops.LSE: lambda n, rows, v: v.logsumexp(1),
    ops.SELECT: _select,
    ops.MATMUL: lambda n, rows, a, b: CONTRACT[n.attrs[0]](a, b),
}
