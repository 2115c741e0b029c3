"""Where a column of one value lies among the columns of another, as arithmetic on the loop's column."""

from __future__ import annotations

from dataclasses import dataclass

from codetta.ir.split import Split


@dataclass(frozen=True, slots=True)
class Digits:
    """For k in range(extent): the column ``(k // width) * outer + (k % width) * inner + offset``.

    One form a map: ``width`` is ``extent`` and ``outer`` 0 where the columns are evenly spaced."""

    extent: int
    width: int
    outer: int
    inner: int
    offset: int

    @property
    def last(self) -> int:
        """The largest column, or a bound of it where the last stretch is not full."""
        return (self.extent - 1) // self.width * self.outer + (self.width - 1) * self.inner + self.offset

    @property
    def is_run(self) -> bool:
        """Neighbouring columns, in order."""
        return self.width == self.extent and self.inner == 1


def digits(extent: int, width: int, outer: int, inner: int, offset: int) -> Digits:
    """The canonical form of a map."""
    if extent <= 1:
        return Digits(extent, max(extent, 1), 0, 1, offset)
    if width >= extent or inner * width == outer:
        return Digits(extent, extent, 0, inner, offset)
    if width == 1:
        return Digits(extent, extent, 0, outer, offset)
    return Digits(extent, width, outer, inner, offset)


def identity(extent: int) -> Digits:
    """Column k itself."""
    return digits(extent, extent, 0, 1, 0)


def moved(d: Digits, by: int) -> Digits:
    """The same columns, further right."""
    return digits(d.extent, d.width, d.outer, d.inner, d.offset + by)


def divided(d: Digits, by: int) -> tuple[Digits, Digits] | None:
    """The quotient and the remainder of the columns by a number, where they have this form."""
    k, w, high, low = d.extent, d.width, d.offset // by, d.offset % by
    if d.last < by:
        return digits(k, k, 0, 0, 0), d
    if d.outer % by == 0 and low + (w - 1) * d.inner < by:
        return digits(k, w, d.outer // by, 0, high), digits(k, w, 0, d.inner, low)
    if d.outer % by == 0 and d.inner % by == 0:
        return digits(k, w, d.outer // by, d.inner // by, high), digits(k, k, 0, 0, low)
    step = d.inner
    if w == k and step and by % step == 0 and low < step:
        return digits(k, by // step, 1, 0, high), digits(k, by // step, 0, step, low)
    return None


def combined(q: Digits, r: Digits, times: int, plus: int) -> Digits | None:
    """``q * times + r + plus``, for a quotient and a remainder of one division."""
    q, r = _alike(q, r.width), _alike(r, q.width)
    if q.width != r.width:
        return None
    outer, inner = q.outer * times + r.outer, q.inner * times + r.inner
    return digits(q.extent, q.width, outer, inner, q.offset * times + r.offset + plus)


def _alike(d: Digits, width: int) -> Digits:
    """Evenly spaced columns written with another width."""
    even = d.width == d.extent and d.extent % width == 0
    return Digits(d.extent, width, d.inner * width, d.inner, d.offset) if even else d


def sizes_of(split: Split, cols: int) -> tuple[int, ...]:
    """The widths of the parts inside one group, of a value with ``cols`` columns."""
    return split.sizes or (cols // split.groups // split.parts,) * split.parts


def part_in_whole(d: Digits, split: Split, cols: int, part: int) -> Digits | None:
    """The columns of the whole (``cols`` wide) that columns of a part are."""
    if split.adjacent:
        return digits(d.extent, d.width, 2 * d.outer, 2 * d.inner, 2 * d.offset + part)
    sizes = sizes_of(split, cols)
    start = sum(sizes[:part])
    if split.groups == 1:
        return moved(d, start)
    found = divided(d, sizes[part])
    return None if found is None else combined(*found, cols // split.groups, start)


def whole_in_part(d: Digits, split: Split, cols: int) -> tuple[int, Digits] | None:
    """The one part in which all these columns of the whole lie, and which columns of it they are."""
    if split.adjacent:
        found = divided(d, 2)
        lane = None if found is None or found[1].inner or found[1].outer else found[1].offset
        return None if found is None or lane is None else (lane, found[0])
    sizes = sizes_of(split, cols)
    found = divided(d, sum(sizes))
    if found is None:
        return None
    start = 0
    for part, size in enumerate(sizes):
        if start <= found[1].offset and found[1].last < start + size:
            inside = combined(*found, size, -start)
            return None if inside is None else (part, inside)
        start += size
    return None
