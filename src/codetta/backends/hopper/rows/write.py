"""The text of one launch's kernel, from its first line to the end of its sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from codetta.backends.hopper.rows.body import Body
from codetta.backends.hopper.rows.cut import Loop, loops
from codetta.backends.hopper.rows.emit import Emitter, stem
from codetta.backends.hopper.rows.fold import (
    finished,
    fold,
    full,
    function_of,
    joined,
    lse_result,
    reduce,
    reduced,
    start,
)
from codetta.backends.hopper.rows.index import Digits
from codetta.backends.hopper.rows.kernel import Argument, Kernel, Sink, form_of
from codetta.backends.hopper.rows.launches import Launch, Output, is_global, is_row_reduction
from codetta.backends.hopper.rows.scope import Row, Scope, at
from codetta.core.node import Node, postorder
from codetta.core.types import Kind, compute_dtype
from codetta.ir import ops

AT_ONCE = 1024  # parts of a total that the last block reads at once


def write(launch: Launch, name: str, parts: Mapping[Node, Node]) -> Kernel:
    """The kernel of a launch; ``parts`` are the parameters that come in parts."""
    arguments, pointers, outputs = _arguments(launch, parts)
    sinks = _sinks(launch)
    form = form_of(launch, sinks, parts)
    body = Body(Emitter(Scope(), pointers, parts, reduce, fold), outputs, form, sinks)
    writer = _Writer(launch, body)
    writer.write()
    if writer.totals:
        arguments += [Argument(f"scratch{i}", "scratch", n) for i, n in enumerate(writer.totals)]
        arguments.append(Argument("counter", "counter"))
    arguments += [Argument("rows", "rows"), Argument("span", "span")]
    constants = ["BM: tl.constexpr", "BT: tl.constexpr"]
    head = f"def {name}({', '.join([*(a.name for a in arguments), *constants])}):"
    text = "\n".join([head, *(f"    {line}" for line in body.e.top.lines)]) + "\n"
    elements = 2048 if not form.block else form.block * form.width
    # of a group that is rotated in halves, a block has half: 16 bytes a thread for those too
    warps = max(1, min(8 if elements < 8192 else 16, elements // (512 if form.grouped else 256)))
    return Kernel(name, text, tuple(arguments), launch.rows, writer.chunks, form.block, warps, form.width, form.in_runs)


def _arguments(launch: Launch, parts: Mapping[Node, Node]) -> tuple[list[Argument], dict[Node, str], dict[Output, str]]:
    """What a kernel is given, and the names of its pointers."""
    arguments: list[Argument] = []
    pointers: dict[Node, str] = {}
    taken: set[str] = {"rows", "span", "counter"}
    for n in postorder(o.value for o in launch.outputs):
        if n.op is ops.INPUT:
            pointers[n] = _unique(f"{stem(n)}_ptr", taken)
            arguments.append(Argument(pointers[n], "input", n))
            if n in parts or (n.type.rows is not None and n.type.cols is not None):
                arguments.append(Argument(f"{pointers[n]}_stride", "stride", n))
            if n in parts:
                arguments.append(Argument(f"{pointers[n]}_parts", "parts", n))
    outputs = {o: _unique(f"out{i}_ptr", taken) for i, o in enumerate(launch.outputs)}
    return [*arguments, *(Argument(name, "output", output=o) for o, name in outputs.items())], pointers, outputs


def _unique(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"_{name}"
    taken.add(name)
    return name


def _sinks(launch: Launch) -> list[Sink]:
    """Everything that is computed column by column or summed, in the order in which it is met."""
    sinks: list[Sink] = []
    for n in postorder(o.value for o in launch.outputs):
        if is_row_reduction(n) and n.type.rows == launch.rows:
            sinks.append(Sink("row", n))
        elif is_global(n):
            sinks.append(Sink("total" if n.type.kind is Kind.SCALAR else "columns", n))
    stored = (o for o in launch.outputs if o.value.type.cols is not None and not is_global(o.value))
    return sinks + [Sink("store", o.value, o) for o in stored]


@dataclass
class _Writer:
    """Fills a body's top scope."""

    launch: Launch
    body: Body
    chunks: int = 1
    totals: list[Node] = field(default_factory=list)  # what the last block adds up

    @property
    def e(self) -> Emitter:
        return self.body.e

    def write(self) -> None:
        """Everything."""
        passes, form, top = self.passes(), self.body.form, self.e.top
        needed = {n for o in self.launch.outputs if not o.in_parts for n in postorder([o.value]) if is_global(n)}
        self.totals = [s.node for s in self.body.sinks if s.what == "total" and s.node in needed]
        if self.launch.rows is not None and not form.in_runs:
            self.rows_at(top, "tl.program_id(0).to(tl.int64) * BM")
        if form.by_chunks and passes:
            every = [loop for found in passes for loop in found]
            self.chunks = max(sum(map(self.body.count, every)), 1)
            start = 0
            for loop in every:
                with self.branch(start, self.body.count(loop), len(every) > 1) as (scope, first):
                    self.body.chunk_of = {(loop.extent, loop.width): self.body.columns_at(scope, loop, first)}
                    self.section(scope, [[loop]])
                start += self.body.count(loop)
        else:
            if form.in_runs:
                pairs = {(loop.extent, loop.width): loop for found in passes for loop in found}
                self.body.chunk_of = {key: self.body.columns_at(top, loop, "0") for key, loop in pairs.items()}
            self.section(top, passes)
        self.finish()

    @contextmanager
    def branch(self, start: int, count: int, one_of_many: bool) -> Iterator[tuple[Scope, str]]:
        """The part of a kernel that a loop's chunks take, and the first column (or group) of the chunk."""
        top, chunk = self.e.top, self.e.name("tl.program_id(1)", self.e.top, "chunk")
        if not one_of_many:
            yield top, chunk
            return
        with top.nested(f"if ({chunk} >= {start}) & ({chunk} < {start + count}):") as scope:
            yield scope, self.e.name(f"{chunk} - {start}", scope, "chunk")

    def passes(self) -> list[list[Loop]]:
        """The loops, in passes: a later pass needs the reductions of an earlier one."""
        level: dict[Node, int] = {}
        for n in postorder(o.value for o in self.launch.outputs):
            level[n] = max((level[a] + is_row_reduction(a) for a in n.args), default=0)
        found: dict[int, list[tuple[int, Node]]] = {}
        for key, s in enumerate(self.body.sinks):
            if s.source.type.cols is not None:
                found.setdefault(level[s.source], []).append((key, s.source))
        return [loops(found[p]) for p in sorted(found)]

    # --- rows -------------------------------------------------------------------------------------------------------

    def rows_at(self, scope: Scope, first: str) -> None:
        """The rows of a block: one above the other, as columns lie side by side; side by side if there are none."""
        flat = self.body.form.block == 0 and not any(n.type.rows is not None for n in self.e.parts)
        flat = flat and not any(s.source.type.cols is not None for s in self.body.sinks)
        scope.lines.append(f"r = ({first} + tl.arange(0, BM)).to(tl.int64){'[None, :]' if flat else '[:, None]'}")
        shape = ("1", "BM") if flat else ("BM", "1")
        self.body.row = Row("r", scope, shape, self.e.name("(r < rows)", scope, "m"))

    @contextmanager
    def rows(self, scope: Scope) -> Iterator[Scope]:
        """The scope in which a block of rows is at hand."""
        if not self.body.form.in_runs:
            yield scope
            return
        first = self.e.name("tl.program_id(0) * span", self.e.top, "first")
        with scope.nested(f"for r0 in range({first}, tl.minimum({first} + span, rows), BM):") as inside:
            self.rows_at(inside, "r0")
            yield inside

    def section(self, scope: Scope, passes: list[list[Loop]]) -> None:
        """The passes over the columns at hand, for all rows of the program."""
        works = [(w, lane) for found in passes for loop in found for w in loop.works for lane in w.lanes]
        in_runs = self.body.form.in_runs  # otherwise each block stores its part as it goes
        columns = [(w, lane) for w, lane in works if in_runs and self.body.sinks[w.key].what == "columns"]
        for w, lane in columns:
            self.body.begin_columns(scope, w.key, lane)
        # a section that has no share in a total stores its neutral element: every block's part is read in the end
        sums = {k: s for k, s in enumerate(self.body.sinks) if s.what == "total"}
        for key, s in sums.items():
            self.body.begin_total(scope, key, s)
        with self.rows(scope) as inside:
            self.vectors_in_parts()
            for found in passes:
                for loop in found:
                    self.body.run(inside, loop)
                self.settle(inside)
            self.vectors(inside)
            for key, s in sums.items():
                self.body.add_total(inside, key, s)
        for w, lane in columns:
            self.store_columns(scope, w.key, lane)
        for key, s in sums.items():
            self.store_total(scope, key, s.node)

    def vectors_in_parts(self) -> None:
        """Other numbers of a row are loaded before what folds its parts waits for these."""
        inputs = [n for n in postorder(o.value for o in self.launch.outputs) if n.op is ops.INPUT]
        if any(n in self.e.parts and n.type.rows is not None for n in inputs):
            for n in inputs:
                if n.type.kind is Kind.COLVEC and n not in self.e.parts and n.type.rows == self.launch.rows:
                    self.e.value(n, self.body.row, None)

    def settle(self, scope: Scope) -> None:
        """The row reductions whose loops are done become known."""
        for key, s in enumerate(self.body.sinks):
            if s.what == "row" and key in self.body.held and (s.node, self.body.row) not in self.e.known:
                fn, found = function_of(s.node), self.body.held[key]
                text = lse_result(*found) if fn == "lse" else found[0]
                for other in found[1:] if fn != "lse" else ():
                    text = joined(fn, text, other)
                self.e.known[s.node, self.body.row] = finished(self.e, s.node, self.e.name(text, scope), scope)

    def vectors(self, scope: Scope) -> None:
        """Stores of one number a row."""
        for o in self.launch.outputs:
            if o.value.type.kind is Kind.COLVEC:
                self.body.store(scope, o, self.e.value(o.value, self.body.row, None), self.body.row, None)

    # --- sums -------------------------------------------------------------------------------------------------------

    def store_columns(self, scope: Scope, key: int, lane: Digits) -> None:
        """A program's part of sums over rows."""
        acc, col = self.body.columns[key, lane]
        self.body.store_part(scope, self.body.sinks[key].node, acc, at(col, lane))

    def store_total(self, scope: Scope, key: int, node: Node) -> None:
        """A block's part of a total."""
        place = f"{self.number()} + {self.body.one()}"
        pointers = [self.body.outputs[o] for o in self.launch.outputs if o.value is node and o.in_parts]
        pointers += [f"scratch{self.totals.index(node)}"] if node in self.totals else []
        scope.lines += [f"tl.store({p} + {place}, {self.body.total[key]})" for p in pointers]

    def number(self) -> str:
        """The number of this block among all."""
        return self.e.name("tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)", self.e.top, "block")

    def finish(self) -> None:
        """Numbers: those made of totals by the last block to arrive, the others by the first block."""
        top = self.e.top
        numbers = [o for o in self.launch.outputs if o.value.type.kind is Kind.SCALAR and not o.in_parts]
        last = [o for o in numbers if any(is_global(n) for n in postorder([o.value]))]
        alone = [o for o in numbers if o not in last]
        if alone:
            with top.nested(f"if {self.number()} == 0:") as self.e.top:
                for o in alone:
                    self.body.store(self.e.top, o, self.e.value(o.value, None, None), None, None)
            self.e.top = top
        if last:
            self.number()
            self.body.one()
            blocks = self.e.name("tl.num_programs(0) * tl.num_programs(1)", top, "blocks")
            top.lines += ["tl.debug_barrier()", "done = tl.atomic_add(counter, 1)"]
            with top.nested(f"if done == {blocks} - 1:") as inside:
                self.e.top = inside
                self.add_up(inside, blocks)
                for o in last:
                    self.body.store(inside, o, self.e.value(o.value, None, None), None, None)
                inside.lines.append("tl.atomic_xchg(counter, 0)")
            self.e.top = top

    def add_up(self, scope: Scope, blocks: str) -> None:
        """The totals from all blocks' parts, in a fixed order and side by side; another block's stores are not in this
        one's L1."""
        t, accs = self.e.fresh("part"), [self.e.fresh("acc") for _ in self.totals]
        of = [(acc, function_of(n), compute_dtype(n.type.dtype)) for acc, n in zip(accs, self.totals, strict=True)]
        scope.lines += [f"{acc} = {full(('1', str(AT_ONCE)), start(fn, dtype), dtype)}" for acc, fn, dtype in of]
        with scope.nested(f"for {t}_0 in range(0, {blocks}, {AT_ONCE}):") as body:
            body.lines.append(f"{t} = {t}_0 + tl.arange(0, {AT_ONCE})[None, :]")
            for i, (acc, fn, dtype) in enumerate(of):
                others = f"mask={t} < {blocks}, other={start(fn, dtype)}, cache_modifier='.cg'"
                body.lines.append(f"{acc} = {joined(fn, acc, f'tl.load(scratch{i} + {t}, {others})')}")
        for n, (acc, fn, _) in zip(self.totals, of, strict=True):
            self.e.known[n, None] = finished(self.e, n, self.e.name(reduced(fn, acc, 1), scope), scope)
