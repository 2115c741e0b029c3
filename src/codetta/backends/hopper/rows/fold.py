"""Reductions where they are met: of parameters that come in parts, inside a group, and of whole rows one by one."""

from __future__ import annotations

from codetta.backends.hopper.rows.emit import Emitter, known, masked
from codetta.backends.hopper.rows.index import Digits, digits
from codetta.backends.hopper.rows.launches import by_group
from codetta.backends.hopper.rows.maps import TRITON
from codetta.backends.hopper.rows.scope import ONE, Col, Row, Scope, Shape, Value, at, both, column, joint
from codetta.core.node import Node
from codetta.core.types import DType, Kind, compute_dtype, f64
from codetta.errors import PlanError
from codetta.ir import ops

PARTS_OF_COLUMN = 256  # parts of a RowVec that are read at once: few blocks share the columns, so each reads much,
AHEAD = 3  # and that many such blocks are on their way
PARTS_OF_SCALAR = 1024
VECTOR = 4  # parts that a thread loads at once
LANES = 128  # parts that a warp loads at once
LSE_PARTS = 1024  # parts of a row that a log-sum-exp takes at once


def function_of(n: Node) -> str:
    """What a reduction does: sum, max, absmax or lse."""
    return "lse" if n.op is ops.LSE else str(n.attrs[0])


def start(fn: str, dtype: DType) -> str:
    """What an accumulator holds at first, as a number in the text; filling a block with it changes no result."""
    if fn == "max":
        return 'float("-inf")' if dtype.is_float else str(-(2 ** (8 * dtype.bytes - 1)))
    return 'float("-inf")' if fn == "lse" else "0"


def joined(fn: str, a: str, b: str) -> str:
    """Two accumulators as one."""
    return f"{a} + {b}" if fn == "sum" else f"larger({a}, {b})"


def reduced(fn: str, x: str, axis: int) -> str:
    """A block's reduction along an axis."""
    return f"tl.reduce({x}, {axis}, {'add' if fn == 'sum' else 'larger'}, keep_dims=True)"


def full(shape: Shape, value: str, dtype: DType) -> str:
    """A block of one number."""
    return f"tl.full(({shape[0]}, {shape[1]}), {value}, {TRITON[dtype]})"


def finished(e: Emitter, n: Node, text: str, scope: Scope) -> Value:
    """An accumulator in the reduction's own dtype."""
    wide = compute_dtype(n.type.dtype)
    return Value(
        e.name(e.to(Value(text, wide), n.type.dtype), scope) if wide is not n.type.dtype else text, n.type.dtype
    )


# --- log-sum-exp ------------------------------------------------------------------------------------------------------


def _exp(dtype: DType) -> str:
    return "tl.exp" if dtype is f64 else "exp"


def lse_step(scope: Scope, m: str, s: str, x: str, dtype: DType, axis: int | None) -> None:
    """One step of the online log-sum-exp: ``m`` is the maximum so far, ``s`` the sum of e^(x - m). Without an axis
    every element of the block has its own."""
    exp = _exp(dtype)
    top, terms = (x, f"{exp}({x} - {m}_at)")
    if axis is not None:
        top, terms = reduced("max", x, axis), reduced("sum", terms, axis)
    scope.lines += [
        f"{m}_new = larger({m}, {top})",
        f"{m}_at = finite({m}_new)",
        f"{s} = {s} * {exp}({m} - {m}_at) + {terms}",
        f"{m} = {m}_new",
    ]


def lse_result(m: str, s: str) -> str:
    """The log-sum-exp from the maximum and the sum."""
    return f"tl.log({s}) + finite({m})"


# --- parameters in parts ----------------------------------------------------------------------------------------------


def fold(e: Emitter, n: Node, row: Row | None, col: Col | None) -> Value:
    """A parameter from its parts, in a fixed order."""
    kind, scope = n.type.kind, e.scope(row, col)
    standard = (row is None or row.shape[1] == "1") and (col is None or col.base.shape[0] == "1")
    if kind is Kind.COLVEC and standard and row is not None:
        lse = function_of(e.parts[n]) == "lse"
        return _fold_lse(e, n, row) if lse else _fold_block(e, n, (row.shape[0], "BT"), row, col)
    if kind is Kind.ROWVEC and standard and col is not None:
        return _fold_block(e, n, (str(PARTS_OF_COLUMN), col.base.shape[1]), row, col)
    if kind is Kind.SCALAR:
        return _fold_block(e, n, ("1", str(PARTS_OF_SCALAR)), row, col)
    j, p = e.fresh("part"), e.pointers[n]
    index = {Kind.COLVEC: f"{row.text} * {p}_stride + {j}" if row is not None else j}.get(kind, "")
    if col is not None:
        c = e.column_text(col)
        index = f"{j} * {p}_stride + {c}" if row is None else f"{row.text} * {p}_stride + {j} * {n.type.cols} + {c}"
    count = f"{p}_parts // {n.type.cols}" if kind is Kind.TABLE else f"{p}_parts"
    shape = joint(row.shape if row is not None else ONE, col.base.shape if col is not None else ONE)
    fn, wide = function_of(e.parts[n]), compute_dtype(n.type.dtype)
    m, s = e.fresh("acc"), e.fresh("sum")
    _begin(scope, fn, m, s, shape, wide)
    with scope.nested(f"for {j} in range(0, {count}):") as body:
        x = e.name(f"tl.load({p} + {index}{masked(row, col)})", body)
        _step(body, fn, m, s, x, wide)
    return Value(e.name(lse_result(m, s), scope) if fn == "lse" else m, n.type.dtype)


def _fold_lse(e: Emitter, n: Node, row: Row) -> Value:
    """The log-sum-exp of a row's parts, BT at a time, which as a rule is all: each then costs one exponential. The last
    one to three come alone: only under a mask that is the same for four neighbours does a thread load 16 bytes."""
    p, scope, wide = e.pointers[n], e.scope(row, None), compute_dtype(n.type.dtype)
    even = e.name(f"{p}_parts // {VECTOR} * {VECTOR}", e.top, "even")
    last = e.name(f"{even} + tl.arange(0, {VECTOR})[None, :]", e.top, "last")
    lane = e.name(f"tl.arange(0, BT if BT < {LANES} else {LANES})[None, :]", e.top, "lane")
    place = e.name(f"{p} + {row.text} * {p}_stride", scope, "p")
    t0, m, s = e.fresh("part"), e.fresh("acc"), e.fresh("sum")

    def load(t: str, bound: str) -> str:
        return f"tl.load({place} + {t}, mask={both(row.mask, f'({t} < {bound})')}, other={start('lse', wide)})"

    rest = e.name(load(last, f"{p}_parts"), scope)  # asked for before the others are waited for
    _begin(scope, "lse", m, s, (row.shape[0], "1"), wide)
    with scope.nested(f"for {t0} in tl.range(0, {even}, BT):") as body:
        more = range(1, LSE_PARTS // LANES)
        body.lines.append(f"{m}_0 = {load(f'({t0} + {lane})', even)}")
        body.lines += [f"if BT > {i * LANES}: {m}_{i} = {load(f'({t0} + {i * LANES} + {lane})', even)}" for i in more]
        _lse_step_wide(body, m, s, len(more), wide)
    scope.lines.append(f"{m}_0 = {rest}")
    _lse_step_wide(scope, m, s, 0, wide)
    return Value(e.name(f"log_of_sum{'64' if wide is f64 else ''}({m}, {s})", scope), n.type.dtype)


def _lse_step_wide(scope: Scope, m: str, s: str, more: int, dtype: DType) -> None:
    """A step of the online log-sum-exp of rows with the block ``m_0`` and, where BT is so large, up to ``more`` beside
    it: all are compared, then added. A warp takes a row, a thread of it four parts of each block."""
    exp, carried = ("exp_less64", "carried64") if dtype is f64 else ("exp_less", "carried")
    beside = [(i, f"if BT > {i * LANES}: ") for i in range(1, more + 1)]
    scope.lines += [f"{m}_top = {m}_0", *(f"{when}{m}_top = larger({m}_top, {m}_{i})" for i, when in beside)]
    scope.lines += [f"{m}_new = larger({m}, {reduced('max', f'{m}_top', 1)})", f"{m}_at = finite({m}_new)"]
    scope.lines.append(f"{s}_all = {exp}({m}_0, {m}_at)")
    scope.lines += [f"{when}{s}_all = {s}_all + {exp}({m}_{i}, {m}_at)" for i, when in beside]
    scope.lines += [f"{s} = {s} * {carried}({m}, {m}_at) + {reduced('sum', f'{s}_all', 1)}", f"{m} = {m}_new"]


def _fold_block(e: Emitter, n: Node, shape: Shape, row: Row | None, col: Col | None) -> Value:
    """Parts that are added or compared, in blocks: along its rows for a RowVec, else along its columns. Each place of a
    block accumulates by itself, and all are reduced at the end. Whole blocks along columns come first, since a thread
    loads 16 bytes only where no mask tells its numbers apart."""
    p, scope, fn, wide = e.pointers[n], e.scope(row, col), function_of(e.parts[n]), compute_dtype(n.type.dtype)
    axis = 0 if n.type.kind is Kind.ROWVEC else 1
    t0, t = e.fresh("part"), e.fresh("part")
    m, s = e.fresh("acc"), e.fresh("sum")
    _begin(scope, fn, m, s, shape, wide)
    outer = row.mask if row is not None else col.mask if col is not None else None

    def add(body: Scope, first: str, bound: str | None) -> None:
        body.lines.append(f"{t} = {first} + tl.arange(0, {shape[axis]}){'[None, :]' if axis else '[:, None]'}")
        mask = both(outer, bound)
        place = t
        if row is not None:
            place = f"{row.text} * {p}_stride + {t}"
        elif col is not None:
            place = f"{t}.to(tl.int64) * {p}_stride + {e.column_text(col)}"
        others = f", mask={mask}, other={start(fn, wide)}" if mask is not None else ""
        _step(body, fn, m, s, e.name(f"tl.load({p} + {place}{others})", body), wide)

    if axis:
        whole = e.name(f"{p}_parts // {shape[1]} * {shape[1]}", e.top, "whole")
        with scope.nested(f"for {t0} in tl.range(0, {whole}, {shape[1]}):") as body:
            add(body, t0, None)
        with scope.nested(f"if {whole} < {p}_parts:") as body:
            add(body, whole, f"({t} < {p}_parts)")
    else:
        with scope.nested(f"for {t0} in tl.range(0, {p}_parts, {shape[0]}, num_stages={AHEAD}):") as body:
            add(body, t0, f"({t} < {p}_parts)")
    return Value(e.name(reduced(fn, m, axis), scope), n.type.dtype)


def _begin(scope: Scope, fn: str, m: str, s: str, shape: Shape, dtype: DType) -> None:
    scope.lines.append(f"{m} = {full(shape, start(fn, dtype), dtype)}")
    if fn == "lse":
        scope.lines.append(f"{s} = {full(shape, '0', dtype)}")


def _step(scope: Scope, fn: str, m: str, s: str, x: str, dtype: DType) -> None:
    if fn == "lse":
        lse_step(scope, m, s, x, dtype, None)
    else:
        scope.lines.append(f"{m} = {joined(fn, m, f'tl.abs({x})' if fn == 'absmax' else x)}")


# --- reductions at a place --------------------------------------------------------------------------------------------


def reduce(e: Emitter, n: Node, row: Row | None, col: Col | None) -> Value:
    """A reduction over columns where it is met: inside a group that is at hand, or else element by element."""
    x = n.args[0]
    if n.op not in (ops.REDUCE, ops.LSE) or x.type.rows != n.type.rows:
        raise PlanError(f"no text for {n}")
    found = _group_at(n, col)
    if found is not None and col is not None and row is not None and row.shape[1] == "1":
        return _in_group(e, n, row, col, found)
    return _one_by_one(e, n, row, col)


def _group_at(n: Node, col: Col | None) -> Digits | None:
    """The columns of group 0, were the group known to the loop as one number for the whole block."""
    if not by_group(n) or col is None or not col.base.width:
        return None
    d, inside = col.digits, known(n.args[0].type.cols) // known(n.type.cols)
    one_group = d.width == col.base.width and d.inner == 0 and d.extent == col.base.extent
    return d if one_group and inside % d.width == 0 else None


def _in_group(e: Emitter, n: Node, row: Row, col: Col, group: Digits) -> Value:
    """The group's columns are the block's, once for each lane."""
    x, fn, wide = n.args[0], function_of(n), compute_dtype(n.type.dtype)
    inside = known(x.type.cols) // known(n.type.cols)
    width, out = col.base.width, ""
    for lane in range(inside // width):
        place = digits(group.extent, width, group.outer * inside, 1, group.offset * inside + lane * width)
        text = e.tensor(e.value(x, row, at(col, place)), wide)
        text = f"tl.abs({text})" if fn == "absmax" else text
        text = text if col.mask is None else f"tl.where({col.mask}, {text}, {start(fn, wide)})"
        text = e.name(text, e.scope(row, col))
        out = e.name(joined(fn, out, text), e.scope(row, col)) if out else text
    found = e.name(reduced(fn, f"tl.broadcast_to({out}, ({row.shape[0]}, {col.base.shape[1]}))", 1), e.scope(row, col))
    return finished(e, n, found, e.scope(row, col))


def _one_by_one(e: Emitter, n: Node, row: Row | None, col: Col | None) -> Value:
    """A loop over single columns: slow, for the rare expression that no block of a kernel's loops has at hand."""
    x, fn, wide, scope = n.args[0], function_of(n), compute_dtype(n.type.dtype), e.scope(row, col)
    cols = known(x.type.cols)
    count = cols
    if n.type.kind is Kind.GROUPVEC or n.type.kind is Kind.TABLE:
        count = cols // known(n.type.cols)
    wide_as, mask = (ONE, None) if col is None or col.is_single else (col.base.shape, col.mask)
    j, m, s = e.fresh("i"), e.fresh("acc"), e.fresh("sum")
    c = "" if col is None else e.column_text(col)
    _begin(scope, fn, m, s, joint(row.shape if row is not None else ONE, wide_as), wide)
    with scope.nested(f"for {j} in range(0, {count}):") as body:
        place = column(j, cols, body, ONE)
        if col is not None:
            text = f"{c} * {count} + {j}" if n.type.kind is Kind.GROUPVEC else f"{j} * {n.type.cols} + {c}"
            place = column(e.name(text, body, "c"), cols, body, wide_as, mask)
        _step(body, fn, m, s, e.tensor(e.value(x, row, place), wide), wide)
    return finished(e, n, e.name(lse_result(m, s), scope) if fn == "lse" else m, scope)
