"""Counter-based random numbers, made where they are used: a function of a seed and an element's row and column.

Private surface of QuACK 0.6.5: `quack.epilogue.ops`."""

from __future__ import annotations

from typing import Any

from codetta.backends.hopper import toolchain  # noqa: F401  prepares what the next imports read
from codetta.backends.hopper.device.ops import places_of

# isort: split
import cutlass
from quack.epilogue.ops import Scalar

START, STEP = 0x9E3779B9, 0x9E3779B1  # the reference backend's ``uniform``: the same bits


def _mixed(h: Any, counter: Any) -> Any:
    """The hash with one counter more: MurmurHash3's finaliser, in unsigned 32 bits."""
    h = h + counter.to(cutlass.Uint32) * cutlass.Uint32(STEP)
    h = (h ^ (h >> 16)) * cutlass.Uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * cutlass.Uint32(0xC2B2AE35)
    return h ^ (h >> 16)


class Random(Scalar):
    """``random(x)`` is a number in [0, 1) of the seed and of the thread's own row and column. The seed is hashed once a
    tile; the compiler keeps a row's hash for all of the row's columns."""

    fn_port = "apply"

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        seed = _mixed(cutlass.Uint32(START), super().begin(gemm, param, smem_tensor, ctx))
        m, n = ctx.tile_coord_mnkl[0], ctx.tile_coord_mnkl[1]
        return [seed, places_of(ctx), m * ctx.tile_M, n * ctx.tile_N]

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        seed, places, row, column = state
        return seed, places[None, None, None, epi_coord], row, column

    def fn_apply(self, gemm: Any, pstate: Any, i: Any, value: Any) -> Any:
        seed, at, row, column = pstate
        h = _mixed(_mixed(seed, row + at[i][0]), column + at[i][1])
        return (h >> 8).to(cutlass.Float32) * 2.0**-24
