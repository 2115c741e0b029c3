"""The text of an expression at a place: every op but the reductions of whole rows, which a kernel's loops make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from codetta.backends.hopper.rows.index import Digits, divided, part_in_whole, sizes_of, whole_in_part
from codetta.backends.hopper.rows.maps import MAPS, TRITON, map_text, number_text
from codetta.backends.hopper.rows.scope import Col, Row, Scope, Value, at, both, column, deepest
from codetta.core.node import Node, postorder
from codetta.core.types import Dim, DType, Kind, Type, bf16, boolean, compute_dtype, f16, f32, f64, i64
from codetta.errors import PlanError, UnsupportedError
from codetta.ir import ops
from codetta.ir.split import Split

Place = tuple[Row | None, Col | None]
COLUMNED = (Kind.TILE, Kind.ROWVEC)


class Reducer(Protocol):
    """How a reduction, or a parameter in parts, is computed where it is met."""

    def __call__(self, e: Emitter, n: Node, row: Row | None, col: Col | None) -> Value:
        """The value of ``n`` at a place."""


@dataclass(slots=True)
class Emitter:
    """Writes values into scopes. ``pointers`` names each parameter's argument, ``parts`` those that come in parts;
    ``known`` are the reductions that a loop has made for the rows of the kernel."""

    top: Scope
    pointers: Mapping[Node, str]
    parts: Mapping[Node, Node]
    reduce: Reducer
    fold: Reducer
    known: dict[tuple[Node, Row | None], Value] = field(default_factory=dict)
    count: int = 0

    def fresh(self, stem: str = "t") -> str:
        """A new name."""
        self.count += 1
        return f"{stem}{self.count}"

    def name(self, text: str, scope: Scope, stem: str = "t") -> str:
        """A name for an expression, the same one each time."""
        found = scope.name_of(text)
        if found is None:
            found = scope.named[text] = self.fresh(stem)
            scope.lines.append(f"{found} = {text}")
        return found

    # --- places -----------------------------------------------------------------------------------------------------

    def scope(self, row: Row | None, col: Col | None) -> Scope:
        """Where a value at this place is computed."""
        return deepest(self.top, *(p.scope for p in (row, col) if p is not None))

    def column_text(self, col: Col) -> str:
        """The columns as an expression."""
        d, b = col.digits, col.base
        if d.width == d.extent:
            even = b.name if d.inner == 1 else f"{b.name} * {d.inner}"
            text = "0" if d.inner == 0 else even
        else:
            exact = d.width == b.width
            high = b.high if exact else self.name(f"{b.name} // {d.width}", b.scope, "g")
            low = b.low if exact else self.name(f"{b.name} % {d.width}", b.scope, "j")
            terms = [(high, d.outer), (low, d.inner)]
            text = " + ".join(t if by == 1 else f"{t} * {by}" for t, by in terms if by) or "0"
        text = f"{text} + {d.offset}" if d.offset else text
        return text if text.isidentifier() else self.name(text, b.scope, "c")

    def column_of(self, col: Col, digits: Digits | None, text: str, extent: int) -> Col:
        """Columns by their digits, or where these have no form by the expression's value."""
        if digits is not None:
            return at(col, digits)
        return column(self.name(text, col.scope, "c"), extent, col.scope, col.base.shape, col.mask)

    def along(self, whole: Type, part: Type, row: Row | None, col: Col | None) -> Place:
        """The place of an argument of type ``part`` in a map whose result has type ``whole``."""
        row = row if part.rows is not None else None
        if part.cols is None:
            return row, None
        if col is None:
            raise PlanError(f"{part} in {whole}")
        if part.kind is whole.kind or (part.kind in COLUMNED and whole.kind in COLUMNED):
            return row, col
        size = known(part.cols)
        inside = known(whole.cols) // size if part.kind is Kind.GROUPVEC else size
        found = divided(col.digits, inside)
        text = self.column_text(col) if found is None else ""
        if part.kind is Kind.GROUPVEC:
            return row, self.column_of(col, found and found[0], f"{text} // {inside}", size)
        return row, self.column_of(col, found and found[1], f"{text} % {inside}", size)

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, n: Node, row: Row | None, col: Col | None) -> Value:
        """The value of a node at a place."""
        row = row if n.type.rows is not None else None
        col = col if n.type.cols is not None else None
        if (n, row) in self.known:
            return self.known[n, row]
        scope, key = self.scope(row, col), (n, row, col)
        found = scope.value_at(key)
        if found is None:
            found = scope.values[key] = self._value(n, row, col)
        return found

    def _value(self, n: Node, row: Row | None, col: Col | None) -> Value:
        if n.op is ops.CONST:
            return Value(number_text(n.attrs[0]), n.type.dtype, is_number=True)
        if n.op in MAPS:
            return self._map(n, row, col)
        if n.op is ops.INPUT:
            return self.fold(self, n, row, col) if n in self.parts else self._load(n, row, col)
        special = {
            ops.CAST: self._cast,
            ops.EXPAND: self._expand,
            ops.PART: self._part,
            ops.JOIN: self._join,
            ops.TURN: self._turn,
            ops.STACK: self._stack,
            ops.TAKE_ROWS: self._take_rows,
            ops.SELECT: self._select,
            ops.COLUMN: self._index,
            ops.ROW: self._index,
        }.get(n.op)
        return self.reduce(self, n, row, col) if special is None else special(n, row, col)

    def held(self, n: Node, text: str, row: Row | None, col: Col | None) -> Value:
        """A named value of the node's dtype."""
        return Value(self.name(text, self.scope(row, col)), n.type.dtype)

    def tensor(self, v: Value, dtype: DType) -> str:
        """A value as a tensor of that dtype; numbers too."""
        return self.name(f"tl.full((1, 1), {v.text}, {TRITON[dtype]})", self.top) if v.is_number else self.to(v, dtype)

    def to(self, v: Value, dtype: DType) -> str:
        """A value as an operand in that dtype; a number stays one, unless float64 asks for more of its digits."""
        if v.is_number:
            return self.tensor(v, dtype) if dtype is f64 else v.text
        if v.dtype is dtype:
            return v.text
        return cast_text(v.text, v.dtype, dtype)

    def _map(self, n: Node, row: Row | None, col: Col | None) -> Value:
        values = [self.value(a, *self.along(n.type, a.type, row, col)) for a in n.args]
        dtype = n.type.dtype if n.op is ops.WHERE else compute_dtype(*(v.dtype for v in values))
        if n.op is not ops.WHERE and n.type.dtype.is_float and n.op is not ops.RANDOM:
            dtype = n.type.dtype
        texts = [self.widened(v, dtype, a, row, col) for v, a in zip(values, n.args, strict=True)]
        if n.op is ops.WHERE:
            texts[0] = self.tensor(values[0], boolean)
        if n.op is ops.RANDOM:
            texts = [self.tensor(v, i64) if v.is_number else v.text for v in values]
        elif all(v.is_number for v in values):
            texts = [self.tensor(v, dtype) for v in values]
        if n.op is ops.EXP and dtype is f32 and is_rounded(n):
            return self.held(n, f"exp_of_rounded({texts[0]})", row, col)
        return self.held(n, map_text(n.op, dtype, texts), row, col)

    def widened(self, v: Value, dtype: DType, a: Node, row: Row | None, col: Col | None) -> str:
        """An argument of a map as an operand, its conversion made once."""
        if v.is_number or v.dtype is dtype or v.dtype is boolean:
            return self.to(v, dtype)
        place = row if a.type.rows is not None else None, col if a.type.cols is not None else None
        return self.name(self.to(v, dtype), self.scope(*place))

    def _cast(self, n: Node, row: Row | None, col: Col | None) -> Value:
        v = self.value(n.args[0], row, col)
        if v.is_number:
            return Value(self.tensor(v, n.type.dtype), n.type.dtype)
        return v if v.dtype is n.type.dtype else self.held(n, cast_text(v.text, v.dtype, n.type.dtype), row, col)

    def _expand(self, n: Node, row: Row | None, col: Col | None) -> Value:
        return self.value(n.args[0], *self.along(n.type, n.args[0].type, row, col))

    def _index(self, n: Node, row: Row | None, col: Col | None) -> Value:
        text = self.column_text(col) if col is not None else row.text if row is not None else "0"
        return self.held(n, f"({text}).to(tl.int32)" if text != "0" else "tl.full((1, 1), 0, tl.int32)", row, col)

    # --- loads ------------------------------------------------------------------------------------------------------

    def _load(self, n: Node, row: Row | None, col: Col | None) -> Value:
        pointer, scope = self.pointers[n], self.scope(row, col)
        if row is not None:
            step = row.text if n.type.cols is None else f"{row.text} * {pointer}_stride"
            pointer = self.name(f"{pointer} + {step}", row.scope, "p")
        if col is not None:
            pointer = f"{pointer} + {self.column_text(col)}"
        text = f"tl.load({pointer}{masked(row, col)})"
        return Value(self.name(text, scope, f"{stem(n)}_"), n.type.dtype)

    # --- columns and rows -------------------------------------------------------------------------------------------

    def _part(self, n: Node, row: Row | None, col: Col | None) -> Value:
        x, split, part = n.args[0], split_of(n), n.attrs[1]
        if col is None or not isinstance(part, int):
            raise PlanError(f"a part without columns: {n}")
        cols = known(x.type.cols)
        digits, text = part_in_whole(col.digits, split, cols, part), ""
        if digits is None:
            sizes, c = sizes_of(split, cols), self.column_text(col)
            start, width = sum(sizes[:part]), sizes[part]
            text = f"{c} // {width} * {cols // split.groups} + {c} % {width} + {start}"
        return self.value(x, row, self.column_of(col, digits, text, cols))

    def _join(self, n: Node, row: Row | None, col: Col | None) -> Value:
        if col is None:
            raise PlanError(f"a join without columns: {n}")
        split, cols = split_of(n), known(n.type.cols)
        found = whole_in_part(col.digits, split, cols)
        if found is not None:
            v = self.value(n.args[found[0]], row, at(col, found[1]))
            if v.is_number:
                return Value(self.tensor(v, n.type.dtype), n.type.dtype)
            return v if v.dtype is n.type.dtype else self.held(n, self.to(v, n.type.dtype), row, col)
        return self._chosen(n, split, row, col)

    def _chosen(self, n: Node, split: Split, row: Row | None, col: Col | None) -> Value:
        """A join where the columns of a block lie in several parts: each part's columns are loaded under a mask."""
        if col is None:
            raise PlanError(f"a join without columns: {n}")
        c, cols, out = self.column_text(col), known(n.type.cols), ""
        sizes = (1, 1) if split.adjacent else sizes_of(split, cols)
        width, start = sum(sizes), 0
        inside = self.name(f"{c} % {width}", col.scope, "j") if width < cols else c
        for a, size in zip(n.args, sizes, strict=True):
            here = self.name(f"({inside} >= {start}) & ({inside} < {start + size})", col.scope, "m")
            before = f"{c} // {width} * {size} + " if width < cols else ""
            own = self.name(f"{before}{inside} - {start}", col.scope, "c")
            part = column(own, cols // width * size, col.scope, col.base.shape, both(col.mask, here))
            v = self.value(a, row, part)
            text = self.tensor(v, n.type.dtype) if v.is_number else self.to(v, n.type.dtype)
            out = f"tl.where({here}, {text}, {out})" if out else text
            start += size
        return self.held(n, out, row, col)

    def _turn(self, n: Node, row: Row | None, col: Col | None) -> Value:
        if row is not None:
            extent = n.type.rows if isinstance(n.type.rows, int) else 1 << 40
            return self.value(n.args[0], None, column(row.text, extent, row.scope, row.shape, row.mask))
        if col is None:
            raise PlanError(f"a turned vector without a place: {n}")
        text = self.name(f"({self.column_text(col)}).to(tl.int64)", col.scope, "r")
        return self.value(n.args[0], Row(text, col.scope, col.base.shape, col.mask), None)

    def _take_rows(self, n: Node, row: Row | None, col: Col | None) -> Value:
        if row is None:
            raise PlanError(f"rows without rows: {n}")
        text = self.name(f"{row.text} + {n.attrs[0]}", row.scope, "r")
        return self.value(n.args[0], Row(text, row.scope, row.shape, row.mask), col)

    def _stack(self, n: Node, row: Row | None, col: Col | None) -> Value:
        if row is None:
            raise PlanError(f"a stack without rows: {n}")
        out, start = "", 0
        for a, size in zip(n.args, (s for s in n.attrs if isinstance(s, int)), strict=True):
            here = self.name(f"({row.text} >= {start}) & ({row.text} < {start + size})", row.scope, "m")
            own = self.name(f"{row.text} - {start}", row.scope, "r")
            v = self.value(a, Row(own, row.scope, row.shape, both(row.mask, here)), col)
            text = self.tensor(v, n.type.dtype)
            out = f"tl.where({here}, {text}, {out})" if out else text
            start += size
        return self.held(n, out, row, col)

    def _select(self, n: Node, row: Row | None, col: Col | None) -> Value:
        if row is None:
            raise PlanError(f"a column selected without rows: {n}")
        x, cols = n.args[0], known(n.args[0].type.cols)
        v = self.value(n.args[1], row, None)
        index = self.tensor(v, i64)
        here = self.name(f"({index} >= 0) & ({index} < {cols})", row.scope, "m")
        found = self.value(x, row, column(self.name(index, row.scope, "c"), cols, row.scope, row.shape, here))
        return self.held(n, f"tl.where({here}, {self.to(found, n.type.dtype)}, 0.0)", row, None)


def is_rounded(n: Node) -> bool:
    """Whether the tiles that a value is made of, of which there are some, are all of 16 bits."""
    tiles = [m.type for m in postorder([n]) if m.op is ops.INPUT and m.type.kind is Kind.TILE]
    return bool(tiles) and all(t.dtype.is_float and t.dtype.bytes == 2 for t in tiles)


def known(cols: Dim | None) -> int:
    """A column count, which kernels are generated for; UnsupportedError where it is a symbol."""
    if not isinstance(cols, int):
        raise UnsupportedError(f"a kernel needs a known column count, not {cols}")
    return cols


def stem(n: Node) -> str:
    """A parameter's name as the start of a name in the text."""
    name = "".join(ch if ch.isascii() and ch.isalnum() else "_" for ch in str(n.attrs[0]))
    return name if name[:1].isalpha() else f"p{name}"


def split_of(n: Node) -> Split:
    """The split of a part or a join."""
    if not isinstance(split := n.attrs[0], Split):
        raise PlanError(f"{n} has no split")
    return split


def masked(row: Row | None, col: Col | None, other: str = "0") -> str:
    """The further arguments of a load at a place."""
    mask = both(row.mask if row is not None else None, col.load_mask if col is not None else None)
    return "" if mask is None else f", mask={mask}, other={other}"


def cast_text(text: str, source: DType, to: DType) -> str:
    """A conversion that rounds to nearest even; to narrow floats by way of float32, as PyTorch does."""
    if to is boolean:
        return f"({text} != 0)"
    if to in (bf16, f16) and source is not f32:
        return f"{text}.to(tl.float32).to({TRITON[to]})"
    return f"{text}.to({TRITON[to]})"
