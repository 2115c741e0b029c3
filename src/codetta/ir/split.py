"""How columns divide into parts: contiguous ranges, the halves of each group, or adjacent columns."""

from __future__ import annotations

from dataclasses import dataclass

from codetta.core.types import Dim, over, times
from codetta.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Split:
    """Columns seen as (groups, sum(sizes)), each group cut into contiguous parts of ``sizes``; with ``adjacent``,
    neighbouring columns go to different parts (Meta's RoPE pairing). Equal parts need no sizes: ``sizes`` is None."""

    groups: int
    parts: int
    sizes: tuple[int, ...] | None = None
    adjacent: bool = False

    def __post_init__(self) -> None:
        """Refuse a second spelling of the same split."""
        if self.sizes is not None and (len(self.sizes) != self.parts or len(set(self.sizes)) < 2):
            raise ShapeError(f"{self.parts} parts of {self.sizes} columns; equal parts have no sizes")
        if self.adjacent and (self.groups, self.parts, self.sizes) != (1, 2, None):
            raise ShapeError("adjacent columns come in two parts, the same for every number of groups")

    @property
    def is_pair(self) -> bool:
        """Two equal lanes: element j of one lane and of the other belong together, in whatever layout."""
        return self.parts == 2 and self.sizes is None

    def part_cols(self, cols: Dim, index: int) -> Dim:
        """The column count of part ``index`` of a value with ``cols`` columns."""
        if not 0 <= index < self.parts:
            raise ShapeError(f"part {index} of {self.parts}")
        inside = over(cols, self.groups, "column count")
        if self.sizes is None:
            over(inside, self.parts, "group width")
            return over(cols, self.parts, "column count")
        if inside != sum(self.sizes):
            raise ShapeError(f"parts of {self.sizes} columns do not add up to the {inside} columns of a group")
        return self.groups * self.sizes[index]

    def ranges(self, cols: int) -> list[tuple[int, int]]:
        """The columns of each part, first and one past the last; of a split with one group."""
        if self.groups != 1 or self.adjacent:
            raise ShapeError("parts of groups, or of adjacent columns, are no ranges of columns")
        sizes = self.sizes or (cols // self.parts,) * self.parts
        ends = [sum(sizes[: i + 1]) for i in range(self.parts)]
        return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def joined_cols(self, part_cols: tuple[Dim | None, ...]) -> Dim:
        """The column count of the whole, given that of each part (None for a part that is a plain zero)."""
        if len(part_cols) != self.parts:
            raise ShapeError(f"{len(part_cols)} parts given for a split in {self.parts}")
        if self.sizes is not None:
            for given, size in zip(part_cols, self.sizes, strict=True):
                if given is not None and given != self.groups * size:
                    raise ShapeError(f"a part has {given} columns, the split says {self.groups} x {size}")
            return self.groups * sum(self.sizes)
        known = {c for c in part_cols if c is not None}
        if len(known) != 1:
            raise ShapeError(f"equal parts have different column counts: {part_cols}")
        (cols,) = known
        over(cols, self.groups, "column count of a part")
        return times(cols, self.parts)


def columns(*sizes: int, groups: int = 1) -> Split:
    """Contiguous ranges of these sizes, in each of ``groups`` groups; equal sizes are one canonical form."""
    if len(set(sizes)) == 1:
        return Split(groups, len(sizes))
    return Split(groups, len(sizes), tuple(sizes))


def halves(groups: int = 1) -> Split:
    """The two halves of each group: gate | up for one group, Hugging Face's RoPE lanes for heads."""
    return Split(groups, 2)


ADJACENT = Split(1, 2, None, True)  # even and odd columns; the same for every number of groups
