"""Loads of vectors that QuACK lacks, on its own protocol: with zeros in the padding, of one range of columns, at both
lanes of a column; columns that a vector names; narrow scalars.

Private surface of QuACK 0.6.5: `quack.epilogue.ops`."""

from __future__ import annotations

from typing import Any

from codetta.backends.hopper import toolchain  # noqa: F401  prepares what the next imports read
from codetta.backends.hopper.device.ops import other_lane, places_of, swapped, within

# isort: split
import cutlass
from cutlass import cute
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import ColVecLoad, RowVecLoad, Scalar


@cute.jit
def _zero_padding(smem: cute.Tensor, limit: cutlass.Int32, size: cutlass.Constexpr[int], ctx: Any) -> None:
    """Write 0 beyond the end of a vector that fills only ``limit`` of a tile's ``size`` places."""
    if limit < size:
        for i in cutlass.range_constexpr(-(-size // ctx.num_epi_threads)):
            at = i * ctx.num_epi_threads + ctx.tidx
            if at >= limit:
                if at < size:
                    smem[at] = smem.element_type(0)


def _begin_padded(op: Any, param: Any, smem: Any, ctx: Any) -> None:
    tile = op._tile_dim(ctx)
    limit = cute.size(param, mode=[cute.rank(param) - 1]) - ctx.tile_coord_mnkl[op._coord_idx()] * tile
    _zero_padding(smem, limit, tile, ctx)


class RowLoad(RowVecLoad):
    """A RowVec (N,), or one of the columns ``start:stop`` of N only; 0 outside, where QuACK's leaves what shared memory
    held."""

    def __init__(self, name: str, start: int = 0, stop: int = 0) -> None:
        super().__init__(name)
        self.start, self.stop = start, stop

    def config_key(self) -> Any:
        return (self.start, self.stop)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        if not self.stop:
            return super().host_fake_arg(key, fctx)
        return make_fake_tensor(key[0], (cute.sym_int(),), leading_dim=0, divisibility=4)

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        ctx = within(ctx, self.start, self.stop)
        _begin_padded(self, param, smem_tensor, ctx)
        return RowVecLoad.begin(self, gemm, param, smem_tensor, ctx)


class LaneRow(RowLoad):
    """``row(x)`` gives a RowVec's values at both lanes of a column, which are ``half`` columns apart in the same head,
    or side by side (0)."""

    fn_port = "apply"

    def __init__(self, name: str, half: int, start: int = 0, stop: int = 0) -> None:
        super().__init__(name, start, stop)
        self.half = half

    def config_key(self) -> Any:
        return (*super().config_key(), self.half)

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        smem, own = super().begin(gemm, param, smem_tensor, ctx)
        return [smem, own, cute.make_rmem_tensor(own.layout, gemm.acc_dtype)]

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        smem, own, other = state
        own = RowVecLoad.begin_loop(self, gemm, [smem, own], epi_coord)
        if self.half == 0:
            return own, swapped(own), None
        lane, coordinate = other_lane(gemm, self.half, epi_coord)
        return own, RowVecLoad.begin_loop(self, gemm, [smem, other], coordinate), lane

    def fn_apply(self, gemm: Any, pstate: Any, i: Any, value: Any) -> Any:
        own, other, lane = pstate
        if lane is None:
            first = i % 2 == 0
            return cutlass.select_(first, own[i], other[i]), cutlass.select_(first, other[i], own[i])
        return (own[i], other[i]) if lane == 0 else (other[i], own[i])


class ColLoad(ColVecLoad):
    """A ColVec (M,); 0 beyond its end."""

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        _begin_padded(self, param, smem_tensor, ctx)
        return ColVecLoad.begin(self, gemm, param, smem_tensor, ctx)


class Hit(ColLoad):
    """``hit(x)`` is whether a column is the one that a ColVec of int32 names for its row. Compared as integers, by the
    thread's own place in the tile; the indices stay in shared memory, a row's in one register."""

    fn_port = "apply"

    @cute.jit
    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        source = ColLoad.begin(self, gemm, param, smem_tensor, ctx)[0]
        source = cute.group_modes(source, 3, cute.rank(source))
        return [source, places_of(ctx), ctx.tile_coord_mnkl[1] * ctx.tile_N]

    @cute.jit
    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        source, places, start = state
        here, at = source[None, None, None, epi_coord], places[None, None, None, epi_coord]
        index = cute.make_rmem_tensor(here.layout, here.element_type)
        rows = cute.filter_zeros(index)
        cute.autovec_copy(cute.filter_zeros(here), rows)
        for i in cutlass.range(cute.size(rows), unroll_full=True):
            rows[i] = rows[i] - start
        return [index, at]

    def fn_apply(self, gemm: Any, pstate: Any, i: Any, value: Any) -> Any:
        index, at = pstate
        return index[i] == at[i][1]


class NarrowScalar(Scalar):
    """A number in 16 bits, read as float32."""

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        return super().begin(gemm, param, smem_tensor, ctx).to(cutlass.Float32)
