"""The loops of a kernel over columns, with what they store and reduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from codetta.backends.hopper.rows.cut import Loop
from codetta.backends.hopper.rows.emit import Emitter
from codetta.backends.hopper.rows.fold import full, function_of, joined, lse_step, reduced, start
from codetta.backends.hopper.rows.index import Digits, identity
from codetta.backends.hopper.rows.kernel import Form, Sink, pow2
from codetta.backends.hopper.rows.launches import Output
from codetta.backends.hopper.rows.scope import ONE, Base, Col, Row, Scope, Value, at, both
from codetta.core.node import Node
from codetta.core.types import compute_dtype


@dataclass
class Body:
    """The text of a kernel's loops. ``held`` are the reductions' accumulators and results, by their place among the
    sinks."""

    e: Emitter
    outputs: Mapping[Output, str]
    form: Form
    sinks: list[Sink]
    row: Row | None = None
    chunk_of: dict[tuple[int, int], Col] = field(default_factory=dict)
    held: dict[int, list[str]] = field(default_factory=dict)
    columns: dict[tuple[int, Digits], tuple[str, Col]] = field(default_factory=dict)
    total: dict[int, str] = field(default_factory=dict)

    # --- columns ----------------------------------------------------------------------------------------------------

    def columns_at(self, scope: Scope, loop: Loop, first: str) -> Col:
        """The columns of a block that begins at ``first``: a column, or a group in a loop over groups."""
        k = self.e.fresh("k")
        if loop.width:
            size = pow2(loop.width)
            j = self.e.fresh("j")
            scope.lines += [f"{j} = tl.arange(0, {size})[None, :]", f"{k} = {first} * {loop.width} + {j}"]
            mask = f"({j} < {loop.width})" if size != loop.width else None
            base = Base(k, loop.extent, scope, ("1", str(size)), loop.width, first, j)
        else:
            size = self.form.step(loop.extent)
            begin = f"{first} * {size}" if self.form.by_chunks else first
            scope.lines.append(f"{k} = {begin} + tl.arange(0, {size})[None, :]")
            mask = f"({k} < {loop.extent})" if loop.extent % size or not loop.extent else None
            base = Base(k, loop.extent, scope, ("1", str(size)))
        return Col(base, identity(loop.extent), self.e.name(mask, scope, "m") if mask else None)

    def count(self, loop: Loop) -> int:
        """The blocks of a loop."""
        return loop.extent // loop.width if loop.width else -(-loop.extent // self.form.step(loop.extent))

    @contextmanager
    def block(self, scope: Scope, loop: Loop) -> Iterator[tuple[Scope, Col]]:
        """The scope in which each block of a loop's columns is at hand."""
        ready = self.chunk_of.get((loop.extent, loop.width))
        if ready is not None:
            yield scope, ready
        elif self.count(loop) == 1:
            yield scope, self.columns_at(scope, loop, "0")
        else:
            first = self.e.fresh("g" if loop.width else "k")
            step = 1 if loop.width else self.form.step(loop.extent)
            stop = loop.extent // loop.width if loop.width else loop.extent
            with scope.nested(f"for {first} in range(0, {stop}, {step}):") as inside:
                yield inside, self.columns_at(inside, loop, first)

    # --- one loop ---------------------------------------------------------------------------------------------------

    def run(self, scope: Scope, loop: Loop) -> None:
        """A loop: stores, and what its reductions come to."""
        size = str(pow2(loop.width) if loop.width else self.form.step(loop.extent))
        shape = (self.row.shape[0] if self.row is not None else "1", size)
        accumulators: dict[int, str] = {}
        for work in loop.works:
            sink = self.sinks[work.key]
            if sink.what in ("row", "total") and work.key not in accumulators:
                accumulators[work.key] = self.begin(scope, work.key, sink, shape)
        with self.block(scope, loop) as (inside, col):
            for work in loop.works:
                for lane in work.lanes:
                    self.step(inside, work.key, at(col, lane), accumulators.get(work.key, ""))
        for key, acc in accumulators.items():
            if function_of(self.sinks[key].node) != "lse":
                fn = function_of(self.sinks[key].node)
                self.held.setdefault(key, []).append(self.e.name(reduced(fn, acc, 1), scope))

    def begin(self, scope: Scope, key: int, sink: Sink, shape: tuple[str, str]) -> str:
        """An accumulator before its loop; log-sum-exp goes on with the one of the loop before."""
        fn, dtype = function_of(sink.node), compute_dtype(sink.node.type.dtype)
        if fn == "lse":
            if key not in self.held:
                m, s = self.e.fresh("max"), self.e.fresh("sum")
                scope.lines += [
                    f"{m} = {full((shape[0], '1'), start(fn, dtype), dtype)}",
                    f"{s} = {full((shape[0], '1'), '0', dtype)}",
                ]
                self.held[key] = [m, s]
            return ""
        acc = self.e.fresh("acc")
        scope.lines.append(f"{acc} = {full(shape, start(fn, dtype), dtype)}")
        return acc

    def step(self, scope: Scope, key: int, col: Col, acc: str) -> None:
        """One block of one expression."""
        sink = self.sinks[key]
        v = self.e.value(sink.source, self.row, col)
        if sink.what == "store" and sink.output is not None:
            self.store(scope, sink.output, v, self.row, col)
            return
        fn, dtype = function_of(sink.node), compute_dtype(sink.node.type.dtype)
        x = self.e.tensor(v, dtype)
        x = f"tl.abs({x})" if fn == "absmax" else x
        mask = (
            f"({col.base.low} == 0)" if col.is_single and col.base.width else col.mask
        )  # a group's number counts once
        if sink.what != "row" and self.row is not None:
            mask = both(self.row.mask, mask)
        x = x if mask is None else f"tl.where({mask}, {x}, {start(fn, dtype)})"
        if fn == "lse":
            m, s = self.held[key]
            shape = f"({self.row.shape[0] if self.row is not None else 1}, {col.base.shape[1]})"
            lse_step(scope, m, s, self.e.name(f"tl.broadcast_to({x}, {shape})", scope), dtype, 1)
            return
        if sink.what == "columns" and not self.form.in_runs:
            self.store_part(scope, sink.node, self.e.name(x, scope), col)
            return
        if sink.what == "columns":
            acc = self.columns[key, col.digits][0]
        scope.lines.append(f"{acc} = {joined(fn, acc, x)}")

    def store(self, scope: Scope, o: Output, v: Value, row: Row | None, col: Col | None) -> None:
        """A store of a value at a place; numbers at no place."""
        pointer = self.outputs[o]
        text = self.e.tensor(v, o.value.type.dtype)
        if row is not None:
            step = row.text if col is None else f"{row.text} * {o.value.type.cols}"
            pointer = self.e.name(f"{pointer} + {step}", row.scope, "p")
        if col is not None:
            pointer = f"{pointer} + {self.e.column_text(col)}"
        if row is None and col is None:
            pointer = f"{pointer} + {self.one()}"
        mask = both(row.mask if row is not None else None, col.load_mask if col is not None else None)
        scope.lines.append(f"tl.store({pointer}, {text}{f', mask={mask}' if mask else ''})")

    # --- sums over rows ---------------------------------------------------------------------------------------------

    def begin_columns(self, scope: Scope, key: int, lane: Digits) -> None:
        """An accumulator of sums over rows, outside the loop over them."""
        node, acc = self.sinks[key].node, self.e.fresh("acc")
        col = next(c for c in self.chunk_of.values() if c.base.extent == lane.extent)
        fn, dtype = function_of(node), compute_dtype(node.type.dtype)
        scope.lines.append(f"{acc} = {full(('BM', col.base.shape[1]), start(fn, dtype), dtype)}")
        self.columns[key, lane] = acc, col

    def store_part(self, scope: Scope, node: Node, value: str, col: Col) -> None:
        """A program's part of a sum over rows, from what is to be summed of its rows."""
        part = self.e.name(f"tl.program_id(0).to(tl.int64) * {node.type.cols}", self.e.top, "part")
        text = self.e.name(reduced(function_of(node), value, 0), scope)
        mask = f", mask={col.load_mask}" if col.load_mask else ""
        for o, pointer in self.outputs.items():
            if o.value is node:
                scope.lines.append(f"tl.store({pointer} + {part} + {self.e.column_text(col)}, {text}{mask})")

    def begin_total(self, scope: Scope, key: int, sink: Sink) -> None:
        """A total of this program, before its first row."""
        dtype = compute_dtype(sink.node.type.dtype)
        self.total[key] = self.e.fresh("total")
        scope.lines.append(f"{self.total[key]} = {full(ONE, start(function_of(sink.node), dtype), dtype)}")

    def add_total(self, scope: Scope, key: int, sink: Sink) -> None:
        """What these rows add to a total."""
        fn, dtype = function_of(sink.node), compute_dtype(sink.node.type.dtype)
        texts = self.held.pop(key, [])
        if sink.source.type.cols is None:
            x = self.e.tensor(self.e.value(sink.source, self.row, None), dtype)
            x = f"tl.abs({x})" if fn == "absmax" else x
            x = x if self.row is None else f"tl.where({self.row.mask}, {x}, {start(fn, dtype)})"
            texts = [self.e.name(x, scope)]
        for x in texts:
            text = x if self.row is None else reduced(fn, x, 1 if self.row.shape[0] == "1" else 0)
            scope.lines.append(f"{self.total[key]} = {joined(fn, self.total[key], text)}")

    def one(self) -> str:
        """The place of a single number."""
        return self.e.name("tl.arange(0, 1)[:, None]", self.e.top, "one")
