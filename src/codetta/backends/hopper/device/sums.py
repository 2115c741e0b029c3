"""Sums of what is not zero in a tile's padding, on QuACK's protocol.

Private surface of QuACK 0.6.5: `quack.epilogue.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codetta.backends.hopper import toolchain  # noqa: F401  prepares what the next imports read

# isort: split
import cutlass
from cutlass import cute
from quack.epilogue.ops import ColVecReduce, RowVecReduce


class _Masked:
    """Clears what lies beyond the last row or column, by QuACK's own hook for maxima."""

    _reduce_dim: Callable[[], int]

    def _mask_oob_active(self) -> bool:
        return True

    @cute.jit
    def _mask_oob(self, frag: Any, coords: Any, limit: Any, tile_shape_mn: Any) -> None:
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            frag[i] = frag[i] if coords[i][self._reduce_dim()] < limit else 0.0


class MaskedRow(_Masked, RowVecReduce):
    """A sum, or a largest absolute value, over the rows that there are."""


class MaskedCol(_Masked, ColVecReduce):
    """A sum, or a largest absolute value, over the columns that there are."""
