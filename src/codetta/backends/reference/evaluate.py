"""What every op means, as one small PyTorch function an op.

Shapes: Tile (M, N), RowVec (N,), ColVec (M,), GroupVec (M, G), Table (M, I), Scalar (). Constants are Python numbers.
Between maps a Tile may also be seen in groups, (M, G, I): lanes of heads then need no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.core.node import Node, Op, postorder
from codetta.core.types import AXES, DType, Kind, Type, bf16, boolean, compute_dtype, f16, f32, f64, i32, i64
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.ir.split import Split

Value = Tensor | float | int | bool
Run = Callable[..., Value]
Meaning = Callable[[Node], Run]  # what a node does, its types looked at once

TORCH: dict[DType, torch.dtype] = {
    f64: torch.float64,
    f32: torch.float32,
    bf16: torch.bfloat16,
    f16: torch.float16,
    i64: torch.int64,
    i32: torch.int32,
    boolean: torch.bool,
}
DTYPE_OF: dict[torch.dtype, DType] = {t: d for d, t in TORCH.items()}


def evaluate(roots: Iterable[Node], feed: dict[Node, Tensor]) -> list[Tensor]:
    """The values of the roots, given the inputs'; leaves that need a row count take it from the feed."""
    roots = list(roots)
    some = next(iter(feed.values()), torch.empty(0))
    rows = next((t.shape[0] for n, t in feed.items() if not isinstance(n.type.rows, int | None)), 0)
    values: dict[Node, Value] = dict(feed)
    for n in postorder(roots, stop=lambda m: m in feed):
        if n not in values:
            if n.op is ops.INPUT:
                raise PlanError(f"no value for the input {n.attrs[0]}")
            values[n] = value_of(n, [values[a] for a in n.args], rows, some.device)
    return [as_tensor(values[r], r.type, some.device) for r in roots]


def value_of(n: Node, args: list[Value], rows: int, device: torch.device) -> Value:
    """The value of one node that is no input, from its arguments', the row count and the device."""
    if not n.args:
        return leaf(n, rows, device)
    return expand_to(n, args[0], rows) if n.op is ops.EXPAND else EVAL[n.op](n)(*args)


def as_tensor(value: Value, type_: Type, device: torch.device) -> Tensor:
    """A tensor in its own shape, a Python number as a 0-d tensor of its type."""
    if isinstance(value, Tensor):
        return flat(value)
    return torch.tensor(value, dtype=TORCH[type_.dtype], device=device)


def flat(x: Tensor) -> Tensor:
    """A Tile that may be seen in groups, as (M, N)."""
    return x.flatten(1) if x.dim() == 3 else x


def leaf(n: Node, rows: int, device: torch.device) -> Value:
    """The value of a CONST, COLUMN or ROW node."""
    if n.op is ops.CONST:
        return n.attrs[0]  # type: ignore[return-value]
    size = n.attrs[0] if isinstance(n.attrs[0], int) else rows
    return torch.arange(size, dtype=torch.int32, device=device)


# --- broadcasting ---------------------------------------------------------------------------------------------------


def align(values: tuple[Value, ...], types: list[Type], out: Type) -> list[Value]:
    """The values reshaped so that PyTorch broadcasts them to ``out``, in groups where one of them is."""
    groups = _groups(values, types, out) if out.kind is Kind.TILE else 0
    return [_aligned(v, t, out, groups) for v, t in zip(values, types, strict=True)]


def _groups(values: tuple[Value, ...], types: list[Type], out: Type) -> int:
    """The number of groups in which to compute; 0 for none. Two factorisations meet in the finer one."""
    counts = {v.shape[1] for v in values if isinstance(v, Tensor) and v.dim() == 3}
    for t in types:
        if t.kind in (Kind.GROUPVEC, Kind.TABLE):
            if not (isinstance(out.cols, int) and isinstance(t.cols, int)):
                raise PlanError(f"the reference backend needs a known column count, got {out}")
            counts.add(t.cols if t.kind is Kind.GROUPVEC else out.cols // t.cols)
    return max(counts, default=0)


def _aligned(v: Value, t: Type, out: Type, groups: int) -> Value:
    if not isinstance(v, Tensor) or t.kind is Kind.SCALAR or (t.kind is out.kind and not groups):
        return v
    if not groups:
        return v.unsqueeze(1) if t.kind is Kind.COLVEC else v
    if t.kind in (Kind.TILE, Kind.ROWVEC):
        return in_groups(v, groups)
    if t.kind is Kind.COLVEC:
        return v[:, None, None]
    if t.kind is Kind.GROUPVEC:
        return v.repeat_interleave(groups // v.shape[1], 1).unsqueeze(2)
    inside = out.cols // groups if isinstance(out.cols, int) else 0
    wide = in_groups(v, v.shape[1] // inside)
    return wide if wide.shape[1] == 1 else wide.repeat(1, groups // wide.shape[1], 1)


def in_groups(v: Tensor, groups: int) -> Tensor:
    """The columns seen as (groups, inside)."""
    if v.dim() == 3 and v.shape[1] == groups:
        return v
    v = flat(v)
    return v.reshape(*v.shape[:-1], groups, v.shape[-1] // groups)


def elementwise(fn: Callable[..., Tensor]) -> Meaning:
    """A map on aligned values, floats narrower than the compute dtype widened first."""

    def meaning(n: Node) -> Run:
        types = [a.type for a in n.args]
        dtype = compute_dtype(*(t.dtype for t in types))
        wide = TORCH[dtype] if dtype.is_float else None
        fits = all(t.kind is n.type.kind or t.kind is Kind.SCALAR for t in types)
        exact = fits and all(t.dtype is dtype or a.op is ops.CONST for a, t in zip(n.args, types, strict=True))

        def run(*values: Value) -> Value:
            if exact and len({v.shape for v in values if isinstance(v, Tensor) and v.dim()}) == 1:
                return fn(*values)
            if wide is not None:
                values = tuple(v.to(wide) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values)
            if not any(isinstance(v, Tensor) for v in values):
                values = (torch.tensor(values[0], dtype=wide), *values[1:])
            return fn(*align(values, types, n.type))

        return run

    return meaning


def whole(fn: Callable[..., Value]) -> Meaning:
    """An op whose function takes the node first."""
    return lambda n: partial(fn, n)


def _cast(n: Node, x: Value) -> Value:
    dtype = TORCH[n.type.dtype]
    return x.to(dtype) if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype)


def expand_to(n: Node, x: Value, rows: int) -> Tensor:
    """EXPAND, which alone of the maps needs to be told the row count."""
    x = as_tensor(x, n.args[0].type, torch.device("cpu"))
    rows = n.type.rows if isinstance(n.type.rows, int) else rows
    if n.type.kind is Kind.SCALAR:
        return x
    if n.type.kind is Kind.COLVEC:
        return x.expand(rows)
    if not isinstance(n.type.cols, int):
        raise PlanError(f"the reference backend needs a known column count, got {n.type}")
    if n.type.kind is Kind.ROWVEC:
        return x.expand(n.type.cols)
    (aligned,) = align((flat(x),), [n.args[0].type], n.type)
    if isinstance(aligned, Tensor) and aligned.dim() == 3:
        groups = aligned.shape[1] if n.args[0].type.kind is Kind.GROUPVEC else n.type.cols // aligned.shape[2]
        return aligned.expand(rows, groups, n.type.cols // groups)
    return aligned.expand(rows, n.type.cols) if isinstance(aligned, Tensor) else x


# --- random ---------------------------------------------------------------------------------------------------------


def _mix(h: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3, on int64 tensors that hold unsigned 32-bit values."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def uniform(seed: Value, row: Value, column: Value) -> Tensor:
    """Counter-based uniform numbers in [0, 1): the same seed, row and column give the same number, on any backend."""
    h = torch.as_tensor(0x9E3779B9, dtype=torch.int64)
    for counter in (seed, row, column):
        h = _mix((h + torch.as_tensor(counter).to(torch.int64) * 0x9E3779B1) & 0xFFFFFFFF)
    return (h >> 8).to(torch.float32) * 2.0**-24


# --- columns, rows, vectors -----------------------------------------------------------------------------------------


def _split_of(n: Node) -> Split:
    if not isinstance(split := n.attrs[0], Split):
        raise PlanError(f"{n} has no split")
    return split


def _part(n: Node, x: Tensor) -> Tensor:
    split, index = _split_of(n), n.attrs[1]
    if not isinstance(index, int):
        raise PlanError(f"{n} has no part index")
    if split.adjacent:
        return flat(x)[..., index :: split.parts]
    grouped = in_groups(x, split.groups)
    sizes = split.sizes or (grouped.shape[-1] // split.parts,) * split.parts
    own = grouped[..., sum(sizes[:index]) : sum(sizes[: index + 1])]
    return own if n.type.kind is Kind.TILE and split.groups > 1 else own.flatten(-2)


def _join(n: Node, *given: Value) -> Tensor:
    split = _split_of(n)
    tensors = [v for v in given if isinstance(v, Tensor) and v.dim()]
    with_rows = (v for v, a in zip(given, n.args, strict=True) if "m" in AXES[a.type.kind])
    lead = next((v.shape[:1] for v in with_rows if isinstance(v, Tensor)), ())
    full: list[Tensor] = []
    for i, v in enumerate(given):
        cols = split.part_cols(n.type.cols or 0, i)
        if not isinstance(cols, int):
            raise PlanError(f"the reference backend needs a known column count, got {n.type}")
        t = v if isinstance(v, Tensor) else tensors[0].new_full((), v)
        wide = t if t.dim() == 3 else t.expand(*lead, cols)
        full.append((flat(wide) if split.adjacent else in_groups(wide, split.groups)).to(TORCH[n.type.dtype]))
    return torch.stack(full, -1).flatten(-2) if split.adjacent else torch.cat(full, -1).flatten(-2)


def _stack(n: Node, *given: Value) -> Tensor:
    tensors = [flat(v) if isinstance(v, Tensor) else v for v in given]
    like = next(v for v in tensors if isinstance(v, Tensor) and v.dim() == 2)
    sizes = [s for s in n.attrs if isinstance(s, int)]
    pairs = zip(tensors, sizes, strict=True)
    return torch.cat([v if isinstance(v, Tensor) and v.dim() else like.new_zeros(s, like.shape[1]) for v, s in pairs])


# --- reductions -----------------------------------------------------------------------------------------------------

_FOLD: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim, dtype=x.dtype),
    "max": lambda x, dim: x.amax(dim),
    "absmax": lambda x, dim: x.abs().amax(dim),
}


def _reduce(n: Node, x: Tensor) -> Tensor:
    fn, to, groups = n.attrs
    fold, kind = _FOLD[str(fn)], n.args[0].type.kind
    x = flat(x).to(TORCH[n.type.dtype])
    if to is Kind.SCALAR:
        return fold(x.flatten(), 0)
    if to is Kind.COLVEC:
        return fold(x, 1)
    if to is Kind.ROWVEC:
        return fold(x, 0)
    if kind is not Kind.TILE or not isinstance(groups, int):
        raise PlanError(f"cannot evaluate {n} of {n.args[0].type}")
    return fold(in_groups(x, groups), 2 if to is Kind.GROUPVEC else 1)


def _select(n: Node, x: Tensor, index: Tensor) -> Tensor:
    """Out-of-range indices (an ignored token's) give 0, as an epilogue that never meets the column would."""
    x = flat(x)
    inside = (index >= 0) & (index < x.shape[1])
    found = x.gather(1, index.to(torch.int64).clamp(0, max(x.shape[1] - 1, 0)).unsqueeze(1)).squeeze(1)
    return torch.where(inside, found, 0).to(TORCH[n.type.dtype])


def contract(form: str, a: Tensor, b: Sequence[Tensor]) -> Tensor:
    """The GEMM of a form, operands widened so that it accumulates in the compute dtype; ``b`` are stacked weights."""
    wide = a.dtype if a.dtype == torch.float64 else torch.float32
    a, parts = a.to(wide), [w.to(wide) for w in b]
    if form == "tn":
        return a.T @ parts[0]
    if len(parts) == 1:
        return a @ parts[0].T if form == "nt" else a @ parts[0]
    if form == "nt":
        out = a.new_empty(a.shape[0], sum(w.shape[0] for w in parts))
        start = 0
        for w in parts:
            torch.mm(a, w.T, out=out[:, start : start + w.shape[0]])
            start += w.shape[0]
        return out
    total, start = None, 0
    for w in parts:
        columns = a[:, start : start + w.shape[0]]
        total = columns @ w if total is None else torch.addmm(total, columns, w, out=total)
        start += w.shape[0]
    if total is None:
        raise PlanError("a GEMM without a second operand")
    return total


EVAL: dict[Op, Meaning] = {
    ops.NEG: elementwise(lambda x: -x),
    ops.ABS: elementwise(torch.abs),
    ops.EXP: elementwise(torch.exp),
    ops.LOG: elementwise(torch.log),
    ops.TANH: elementwise(torch.tanh),
    ops.ERF: elementwise(torch.erf),
    ops.SQRT: elementwise(torch.sqrt),
    ops.RSQRT: elementwise(torch.rsqrt),
    ops.RECIP: elementwise(torch.reciprocal),
    ops.SIN: elementwise(torch.sin),
    ops.COS: elementwise(torch.cos),
    ops.SIGMOID: elementwise(torch.sigmoid),
    ops.SILU: elementwise(F.silu),
    ops.GELU: elementwise(F.gelu),
    ops.GELU_TANH: elementwise(lambda x: F.gelu(x, approximate="tanh")),
    ops.ADD: elementwise(lambda a, b: a + b),
    ops.SUB: elementwise(lambda a, b: a - b),
    ops.MUL: elementwise(lambda a, b: a * b),
    ops.DIV: elementwise(lambda a, b: a / b),
    ops.MAXIMUM: elementwise(lambda a, b: torch.maximum(*_tensors(a, b))),
    ops.MINIMUM: elementwise(lambda a, b: torch.minimum(*_tensors(a, b))),
    ops.FLOORDIV: elementwise(lambda a, b: a // b),
    ops.MOD: elementwise(lambda a, b: a % b),
    ops.EQ: elementwise(lambda a, b: a == b),
    ops.NE: elementwise(lambda a, b: a != b),
    ops.LT: elementwise(lambda a, b: a < b),
    ops.LE: elementwise(lambda a, b: a <= b),
    ops.GT: elementwise(lambda a, b: a > b),
    ops.GE: elementwise(lambda a, b: a >= b),
    ops.AND: elementwise(lambda a, b: a & b),
    ops.OR: elementwise(lambda a, b: a | b),
    ops.NOT: elementwise(lambda a: ~a),
    ops.WHERE: elementwise(torch.where),
    ops.CAST: whole(_cast),
    ops.RANDOM: elementwise(uniform),
    ops.EXPAND: whole(lambda n, x: expand_to(n, x, 0)),
    ops.PART: whole(_part),
    ops.JOIN: whole(_join),
    ops.TURN: lambda n: lambda x: x,
    ops.STACK: whole(_stack),
    ops.TAKE_ROWS: whole(lambda n, x: x[n.attrs[0] : n.attrs[1]]),
    ops.REDUCE: whole(_reduce),
    ops.LSE: whole(lambda n, x: torch.logsumexp(flat(x).to(TORCH[n.type.dtype]), 1)),
    ops.SELECT: whole(_select),
    ops.MATMUL: whole(lambda n, a, b: contract(n.attrs[0], flat(a), [flat(b)])),
}


def _tensors(a: Value, b: Value) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    if not isinstance(like, Tensor):
        like = torch.tensor(math.nan)
    return tuple(v if isinstance(v, Tensor) else like.new_tensor(v) for v in (a, b))  # type: ignore[return-value]
