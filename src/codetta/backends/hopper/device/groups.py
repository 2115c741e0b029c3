"""What belongs to groups of columns, on QuACK's protocol: statistics of them, stores of these, values spread over them.

Private surface of QuACK 0.6.5: `quack.epilogue.ops`."""

from __future__ import annotations

from typing import Any

from codetta.backends.hopper import toolchain  # noqa: F401  prepares what the next imports read
from codetta.backends.hopper.device.dialect import NAMES
from codetta.backends.hopper.device.ops import by_subtile, places_of, tile_within, within

# isort: split
import cutlass
from cutlass import const_expr, cute
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import torch2cute_dtype_map
from quack.epilogue.ops import EpiOp, GroupedColStatsBase, GroupedColStatsOut


class GroupStatistic(GroupedColStatsBase):
    """A sum or a maximum over each group of columns of the accumulator, ``finish``ed by the text of a function of the
    ``total``."""

    def __init__(self, name: str, kind: str, finish: str) -> None:
        super().__init__(name)
        self.combine = {"sum": "add", "max": "max"}[kind]
        self.finish = finish

    def config_key(self) -> Any:
        return (self.combine, self.finish)

    def stat_value(self, total: Any, group_cols: int) -> Any:
        return eval(self.finish, NAMES, {"total": total})


class GroupOut(GroupedColStatsOut):
    """Stores a statistic's values (M, groups), of the columns ``start:stop`` only (0:0: of all)."""

    def __init__(self, name: str, statistic: GroupStatistic, start: int = 0, stop: int = 0) -> None:
        super().__init__(name, statistic)
        self.start, self.stop = start, stop

    def config_key(self) -> Any:
        return (*super().config_key(), self.start, self.stop)

    def host_validate(self, value: Any, *, n: int, **rest: Any) -> None:
        super().host_validate(value, n=(self.stop - self.start) or n, **rest)

    def end_loop_finish(self, gemm: Any, param: Any, staged: Any, tile_coord_mnkl: Any, varlen_manager: Any) -> Any:
        if self.stop:
            tile_coord_mnkl, _ = tile_within(tile_coord_mnkl, gemm.cta_tile_shape_mnk[1], self.start, self.stop)
        return super().end_loop_finish(gemm, param, staged, tile_coord_mnkl, varlen_manager)


class Spread(EpiOp):
    """A value that several columns share, read from global memory: one per row and group of ``inside`` columns (of the
    columns ``start:stop`` only, 0:0: of all); or, with ``pairs``, a table whose every column is that of two adjacent
    ones, repeated after 2 ``inside`` columns. 0 beyond the last row and column."""

    fn_port = "value"

    def __init__(self, name: str, inside: int, pairs: bool = False, start: int = 0, stop: int = 0) -> None:
        super().__init__(name)
        self.inside, self.pairs, self.start, self.stop = inside, pairs, start, stop

    def config_key(self) -> Any:
        return (self.inside, self.pairs, self.start, self.stop)

    def host_arg_key(self, value: Any) -> Any:
        return (torch2cute_dtype_map[value.dtype],)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        cols = self.inside if self.pairs else cute.sym_int()
        return make_fake_tensor(key[0], (fctx.m, cols), leading_dim=1, divisibility=1)

    def param_fields(self) -> Any:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> Any:
        return {self.name: getattr(args, self.name)}

    @cute.jit
    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        own = const_expr(within(ctx, self.start, self.stop))
        m, n = own.tile_coord_mnkl[0], own.tile_coord_mnkl[1]
        width = const_expr(self.stop - self.start) if const_expr(self.stop) else ctx.varlen_manager.len_n()
        rows = param.shape[0] - m * ctx.tile_M
        columns = width - n * ctx.tile_N
        groups = const_expr(ctx.tile_N // self.inside)
        origin = cute.domain_offset((m * ctx.tile_M, 0 if const_expr(self.pairs) else n * groups), param).iterator
        shape: Any = (self.inside, groups)
        stride: Any = (0, 1)
        if const_expr(self.pairs):
            shape, stride = ((2, self.inside), ctx.tile_N // (2 * self.inside)), ((0, 1), 0)
        layout = cute.make_layout((ctx.tile_M, shape), stride=(param.stride[0], stride))
        view = cute.make_tensor(origin, layout)
        return [by_subtile(ctx, view), places_of(ctx), rows, columns]

    @cute.jit
    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        source, places, rows, columns = state
        here, at = source[None, None, None, epi_coord], places[None, None, None, epi_coord]
        found = cute.make_rmem_tensor(at.layout.shape, gemm.acc_dtype)
        found.fill(0.0)
        for i in cutlass.range(cute.size(found), unroll_full=True):
            if at[i][0] < rows and at[i][1] < columns:
                found[i] = here[i].to(gemm.acc_dtype)
        return found
