"""Which columns a kernel computes together: the lanes of an expression, so that no value is made twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from codetta.backends.hopper.rows.emit import known, split_of
from codetta.backends.hopper.rows.index import Digits, digits, identity, moved, part_in_whole, sizes_of, whole_in_part
from codetta.backends.hopper.rows.launches import by_group
from codetta.backends.hopper.rows.maps import MAPS
from codetta.core.node import Node, postorder
from codetta.core.types import Kind
from codetta.ir import ops
from codetta.ir.split import Split

Lanes = tuple[Digits, ...]  # columns of one value, computed in one step of a loop over their common extent
WIDEST_GROUP = 8192  # columns of a group that a block can hold
THROUGH = {*MAPS, ops.CAST, ops.EXPAND, ops.STACK, ops.TAKE_ROWS}


@dataclass(frozen=True, slots=True)
class Work:
    """Columns of an expression to compute: ``key`` says for which output or reduction."""

    key: int
    node: Node
    lanes: Lanes


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over ``extent`` columns, in groups of ``width`` where a reduction inside groups needs that (else 0)."""

    extent: int
    width: int
    works: tuple[Work, ...]


def cut(n: Node) -> list[Lanes]:
    """All columns of a value, in lanes that leave no join of columns to be decided element by element."""
    return _cut(n, identity(known(n.type.cols)))


def _cut(n: Node, d: Digits) -> list[Lanes]:
    join = _undecided(n, d) if d.is_run else None
    if join is None:
        return [(d,)]
    split, cols = split_of(join), d.extent
    lanes = []
    for i, size in enumerate((cols // 2,) * 2 if split.adjacent else (s * split.groups for s in sizes_of(split, cols))):
        lane = part_in_whole(identity(size), split, cols, i)
        if lane is None:
            return [(d,)]
        lanes.append(moved(lane, d.offset))
    finer = [_cut(n, lane) for lane in lanes]
    if split.sizes is not None or any(len(f) > 1 or len(f[0]) > 1 for f in finer):
        return [lanes for f in finer for lanes in f]
    return [tuple(lanes)]


def _undecided(n: Node, d: Digits) -> Node | None:
    """A join below maps of which these columns need all parts."""
    if n.op is ops.JOIN:
        found = whole_in_part(d, split_of(n), known(n.type.cols))
        if found is not None:
            return _undecided(n.args[found[0]], found[1]) if found[1].is_run else None
        return n if d.offset == 0 and d.extent == n.type.cols else None
    if n.op not in THROUGH:
        return None
    wide = (a for a in n.args if a.type.kind is n.type.kind and a.type.cols == n.type.cols)
    return next((j for a in wide if (j := _undecided(a, d)) is not None), None)


def loops(works: Sequence[tuple[int, Node]]) -> list[Loop]:
    """The loops that compute these expressions: what has the same extent shares one, and its loads."""
    cuts = {key: cut(n) for key, n in works}
    extents = {lanes[0].extent for found in cuts.values() for lanes in found if len(lanes) > 1}
    extents |= {found[0][0].extent for found in cuts.values() if len(found) == 1}
    splits = [s for _, n in works for s in _splits(n)]
    merged: dict[tuple[int, int], list[Work]] = {}
    for key, n in works:
        found = cuts[key]
        if n.type.kind is Kind.GROUPVEC and _grouped_source(n) is not None:
            continue
        if len(found) == 1 and len(found[0]) == 1:
            found = [_adopted(n, found[0][0], splits, extents)]
        for lanes in found:
            extent = lanes[0].extent
            merged.setdefault((extent, _group_width(n, lanes)), []).append(Work(key, n, lanes))
    for key, n in works:
        if n.type.kind is Kind.GROUPVEC and (source := _grouped_source(n)) is not None:
            groups = known(n.type.cols)
            own = (source, source // groups)
            extent, width = next(((e, w) for e, w in merged if w and e == groups * w), own)
            lanes = (digits(extent, width, 1, 0, 0),)
            merged.setdefault((extent, width), []).append(Work(key, n, lanes))
    return [Loop(extent, width, tuple(found)) for (extent, width), found in _together(merged).items()]


def _together(merged: dict[tuple[int, int], list[Work]]) -> dict[tuple[int, int], list[Work]]:
    """What needs no groups joins a loop of the same extent that has them."""
    out: dict[tuple[int, int], list[Work]] = {}
    for (extent, width), works in merged.items():
        widths = sorted({w for e, w in merged if e == extent})
        own = widths[-1] if width == 0 else width
        out.setdefault((extent, own), []).extend(works)
    return out


def _splits(n: Node) -> Iterable[tuple[Split, int, set[Node]]]:
    """The equal splits that an expression makes or reads, with the number of columns split and the tiles read."""
    for m in postorder([n]):
        whole = m.args[0] if m.op is ops.PART else m
        if m.op in (ops.PART, ops.JOIN) and whole.type.kind is Kind.TILE and split_of(m).sizes is None:
            yield split_of(m), known(whole.type.cols), _tiles(whole)


def _tiles(n: Node) -> set[Node]:
    return {m for m in postorder([n]) if m.op is ops.INPUT and m.type.kind is Kind.TILE}


def _adopted(n: Node, whole: Digits, splits: list[tuple[Split, int, set[Node]]], extents: set[int]) -> Lanes:
    """The lanes in which another expression of the same loop already reads columns that this one reads too."""
    if n.type.kind is not Kind.TILE:
        return (whole,)
    for split, cols, tiles in splits:
        size = cols // split.parts
        if cols == whole.extent and size in extents and size != cols and tiles & _tiles(n):
            lanes = [part_in_whole(identity(size), split, cols, i) for i in range(split.parts)]
            if all(lane is not None for lane in lanes):
                return tuple(lane for lane in lanes if lane is not None)
    return (whole,)


def _group_width(n: Node, lanes: Lanes) -> int:
    """The width of the groups, in this loop's columns, of a reduction inside groups that they are computed from; 0
    without one."""
    extent, reached = lanes[0].extent, _reached(n, lanes)
    for m in postorder([n]):
        if m in reached and by_group(m):
            groups = known(m.type.cols)
            if extent % groups == 0 and 1 < extent // groups <= WIDEST_GROUP:
                return extent // groups
    return 0


def _reached(n: Node, lanes: Lanes) -> set[Node]:
    """What these columns of a value are computed from: of a join, the parts alone that they lie in."""
    found: set[Node] = set()
    todo, seen = [(n, d) for d in lanes], set[tuple[Node, Digits]]()
    while todo:
        m, d = todo.pop()
        if (m, d) in seen:
            continue
        seen.add((m, d))
        part = whole_in_part(d, split_of(m), known(m.type.cols)) if m.op is ops.JOIN else None
        if part is not None:
            todo.append((m.args[part[0]], part[1]))
            continue
        alike = [a for a in m.args if a.type.kind is m.type.kind and a.type.cols == m.type.cols]
        through = alike if m.op in THROUGH else []
        found |= {m, *postorder([a for a in m.args if a not in through])}
        todo += [(a, d) for a in through]
    return found


def _grouped_source(n: Node) -> int | None:
    """The columns whose groups a GroupVec is made of, where it is made of a reduction inside groups."""
    for m in postorder([n]):
        if by_group(m) and m.type.cols == n.type.cols:
            cols = known(m.args[0].type.cols)
            return cols if 1 < cols // known(m.type.cols) <= WIDEST_GROUP else None
    return None
