"""Epilogue operations that QuACK lacks, on its own protocol: stores into ranges of columns, tables that repeat, the
other lane of a column.

Private surface of QuACK 0.6.5: `quack.epilogue.ops` and attributes of its GEMM object."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

from codetta.backends.hopper import toolchain  # noqa: F401  prepares what the next imports read

# isort: split
import cutlass
from cutlass import const_expr, cute
from quack import copy_utils
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import torch2cute_dtype_map
from quack.epilogue.ops import Scalar, TileLoad, TileStore
from quack.gemm_sm90 import GemmSm90
from quack.gemm_tvm_ffi_utils import div_for_dtype, fake_batched

NARROW = 16  # columns of an epilogue subtile of ours: half of QuACK's


def narrow_subtile(
    cta_tile: Any, atom_layout: Any, element_type: Any = None, epi_tile_override: Any = None
) -> tuple[int, int]:
    """QuACK's epilogue subtile, ``NARROW`` columns wide."""
    m, n = GemmSm90._compute_tile_shape_or_override(cta_tile, atom_layout, element_type, epi_tile_override)
    return m, math.gcd(n, NARROW)


class ViewStore(TileStore):
    """Stores the accumulator's columns ``start:stop`` (0:0: all) to a tensor of that width. Row strides are free."""

    def __init__(self, name: str, gated: bool = False, start: int = 0, stop: int = 0, narrow: bool = False) -> None:
        super().__init__(name, gated=gated)
        self.start, self.stop, self.narrow = start, stop, narrow

    def config_key(self) -> Any:
        return (*super().config_key(), self.start, self.stop, self.narrow)

    def epi_tile_shape_override(self, arch: int, cta_tile_shape_mnk: Any, atom_layout_mnk: Any) -> Any:
        if self.narrow and arch == 90:
            return narrow_subtile(cta_tile_shape_mnk, atom_layout_mnk)
        return super().epi_tile_shape_override(arch, cta_tile_shape_mnk, atom_layout_mnk)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, major = key
        if not self.stop:
            return super().host_fake_arg(key, fctx)
        n = cute.sym_int(divisibility=div_for_dtype(dtype))
        batch = fctx.l if fctx.batched else None
        return fake_batched(dtype, fctx.m, n, batch, 1 if major == "n" else 0, div_for_dtype(dtype))

    def store_setup(
        self,
        gemm: Any,
        params: Any,
        smem_tensor: Any,
        tiled_copy_r2s: Any,
        tiled_copy_t2r: Any,
        tile_coord_mnkl: Any,
        varlen_manager: Any,
        tidx: Any,
    ) -> Any:
        rest = (varlen_manager, tidx)
        if not self.stop:
            return super().store_setup(
                gemm, params, smem_tensor, tiled_copy_r2s, tiled_copy_t2r, tile_coord_mnkl, *rest
            )
        at, inside = tile_within(tile_coord_mnkl, gemm.cta_tile_shape_mnk[1], self.start, self.stop)
        found = super().store_setup(gemm, params, smem_tensor, tiled_copy_r2s, tiled_copy_t2r, at, *rest)
        return (*found[:3], inside)


class TableLoad(TileLoad):
    """A (M, inside) table whose columns repeat over the accumulator's, through the TMA pipeline: each subtile loads
    the table's box at its column modulo ``inside``."""

    def host_arg_key(self, value: Any) -> Any:
        return torch2cute_dtype_map[value.dtype], value.shape[-1]

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, inside = key  # static: where a subtile falls in the table is known when the kernel is traced
        return make_fake_tensor(dtype, (fctx.m, inside), leading_dim=1, divisibility=128 // dtype.width)

    def load_g2s_copy_fn(
        self,
        gemm: Any,
        params: Any,
        smem_tensor: Any,
        tile_coord_mnkl: Any,
        varlen_manager: Any,
        epi_pipeline: Any,
    ) -> Any:
        tensor = varlen_manager.offset_batch_epi(getattr(params, self.name), tile_coord_mnkl[3])
        inside = const_expr(tensor.shape[1])
        tile_m, tile_n = gemm.cta_tile_shape_mnk[0], gemm.cta_tile_shape_mnk[1]
        epi_tile = getattr(params, self._epi_tile_key())
        repeats = const_expr(inside // cute.size(epi_tile[1]))
        copy, _, _ = gemm.epilog_gmem_copy_and_partition(
            getattr(params, self._tma_atom_key()),
            tensor,
            (tile_m, inside),
            epi_tile,
            smem_tensor,
            (tile_coord_mnkl[0], 0),
        )
        inner = copy_utils.tma_producer_copy_fn(copy, epi_pipeline)
        if tile_n % inside:
            raise ValueError(f"a table of {inside} columns does not divide a tile of {tile_n}")
        shape = cute.zipped_divide(cute.make_layout(gemm.cta_tile_shape_mnk[:2]), epi_tile).shape[1]
        order = (0, 1) if const_expr(gemm.epi_m_major) else (1, 0)
        subtiles = cute.make_ordered_layout(shape, order=order)

        def copy_subtile(src_idx: Any, producer_state: Any, **kw: Any) -> None:
            at = src_idx if isinstance(src_idx, tuple) else subtiles.get_hier_coord(src_idx)
            inner((at[0], at[1] % repeats), producer_state, **kw)

        return copy_subtile


class Partner(Scalar):
    """``partner(x)`` gives the accumulator's value at the other lane of a column: ``half`` columns away in the same
    head, or beside it (0); and the lane, 0 or 1, that the own column is in. Both lie in the same thread's registers."""

    fn_port = "apply"

    def __init__(self, name: str, half: int) -> None:
        super().__init__(name, dtype=cutlass.Int32)
        self.half = half

    def config_key(self) -> Any:
        return (*super().config_key(), self.half)

    def to_params(self, gemm: Any, args: Any) -> Any:
        gemm.epi_load_acc_subtile = partial(_load_and_note, gemm)
        return super().to_params(gemm, args)

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        return ctx.tRS_rD_layout

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        other = cute.make_rmem_tensor(state, gemm.acc_dtype)
        if self.half == 0:
            cute.autovec_copy(gemm.accumulator[None, None, None, epi_coord], other)
            return swapped(other), None
        lane, coordinate = other_lane(gemm, self.half, epi_coord)
        cute.autovec_copy(gemm.accumulator[None, None, None, coordinate], other)
        return other, lane

    def fn_apply(self, gemm: Any, pstate: Any, i: Any, value: Any) -> Any:
        other, lane = pstate
        return other[i], i % 2 if lane is None else lane


def swapped(fragment: Any) -> Any:
    """A subtile's values with each two adjacent columns exchanged: a thread's registers hold them side by side."""
    found = cute.make_rmem_tensor(fragment.layout.shape, fragment.element_type)
    for i in range(0, cute.size(fragment), 2):
        found[i], found[i + 1] = fragment[i + 1], fragment[i]
    return found


def by_subtile(ctx: Any, tensor: Any) -> Any:
    """A thread's part of something that has a tile's shape: [..., subtile], in the order of its accumulator."""
    found = ctx.partition_for_epilogue_fn(tensor)
    return cute.group_modes(found, 3, cute.rank(found))


def places_of(ctx: Any) -> Any:
    """The row and column in the tile of each of a thread's values, by subtile."""
    return by_subtile(ctx, cute.make_identity_tensor((ctx.tile_M, ctx.tile_N)))


FAR = 1 << 16  # a tile that is in no tensor: its address is formed, and nothing is read or written there


def tile_within(tile_coord_mnkl: Any, tile_n: int, start: int, stop: int) -> tuple[Any, Any]:
    """The coordinate of a tile counted from column ``start``, and whether it lies in ``start:stop``, both of which
    tiles divide; outside it is one that lies in no tensor."""
    m, n, k, batch = tile_coord_mnkl
    first, last = start // tile_n, stop // tile_n
    inside = (n >= first) & (n < last)
    return (m, cutlass.select_(inside, n - first, cutlass.Int32(FAR)), k, batch), inside


def within(ctx: Any, start: int, stop: int) -> Any:
    """The context of a tile as it is for a tensor that has the columns ``start:stop`` only (0:0: all)."""
    if not stop:
        return ctx
    found = copy.copy(ctx)
    found.tile_coord_mnkl, _ = tile_within(ctx.tile_coord_mnkl, ctx.tile_N, start, stop)
    return found


def other_lane(gemm: Any, half: int, epi_coord: Any) -> tuple[int, Any]:
    """The lane that a subtile is in, known when the kernel is traced, and the coordinate of the other's subtile."""
    apart = half // cute.size(gemm.epi_tile[1])
    m, n = epi_coord
    lane = (n // apart) % 2
    return lane, (m, n + apart if lane == 0 else n - apart)


def _load_and_note(gemm: Any, accumulator: Any, target: Any, epi_coord: Any, no_release: bool = False) -> None:
    """GemmBase.epi_load_acc_subtile, which also leaves the whole accumulator where ``Partner`` finds it."""
    gemm.accumulator = accumulator
    cute.autovec_copy(accumulator[None, None, None, epi_coord], target)
