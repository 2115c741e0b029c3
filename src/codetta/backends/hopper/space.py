"""The configurations that a program can run with: those that are known to be good, in the order of what they should
cost, and those that tuning tries besides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from codetta.backends.hopper.config import BUCKETS, Config, fits
from codetta.backends.hopper.lowered import Lowered

SMS = 132  # of an H100 or H200, SXM
# Fitted to kernels timed on an H200: what a tile costs beyond its arithmetic.
OPERAND_COST = 25.0  # by the rows and columns that a tile must load for one product
TILE_COST = 130.0  # of one tile that the epilogue loads or stores, in steps of the inner dimension
HIDDEN = 0.3  # the part of that which ping-pong does not hide behind the other warp group's products
LONG = re.compile(r"\b(?:gelu|erf|tanh)\(|_random\b")  # what takes dozens of instructions

SQUARE = Config(128, 128, pingpong=True)
WIDE = Config(128, 256)
PAIR = (WIDE, SQUARE, Config(128, 192, pingpong=True), Config(128, 160, pingpong=True))
# An exponential an element hides behind the other warp group's products only: 128x256 took 8 to 33 % longer.
LOSS = (Config(128, 160, pingpong=True, narrow=True), replace(SQUARE, narrow=True))
SOFTMAXES = (Config(128, 128, narrow=True), Config(128, 64, pingpong=True))  # two registers a row and log-sum-exp
STREAM = (
    Config(128, 192, pingpong=True, narrow=True),
    Config(128, 160, pingpong=True, narrow=True),
    replace(WIDE, narrow=True),
    replace(SQUARE, narrow=True),
)
SUMS = (replace(SQUARE, narrow=True), SQUARE, replace(WIDE, narrow=True))  # 128x160 spills in float16
GATED = (SQUARE, replace(WIDE, narrow=True))
PLAIN = (WIDE, Config(128, 192, pingpong=True), Config(128, 160, pingpong=True), SQUARE)
HALVES = (
    SQUARE,
    replace(SQUARE, narrow=True),
    Config(128, 192, pingpong=True, narrow=True),
    Config(128, 160, pingpong=True, narrow=True),  # heads of 80
    Config(128, 64, pingpong=True, narrow=True),
)
# Values that live through a pass over the tile before the first store, and places to compare with, take registers.
GUARDED = (
    replace(SQUARE, narrow=True),
    Config(128, 64, pingpong=True, narrow=True),
    Config(64, 256, pingpong=True, narrow=True),  # heads of 256; without a statistic these spill
)
# The same behind heads whose halves are 64 columns and more: 128x128 ping-pong spills, and 128x256 has two stages.
WIDE_HEADS = (Config(64, 256, pingpong=True, narrow=True), Config(64, 128, pingpong=True, narrow=True))
# What tuning tries, by tile. Which of these spill differs from program to program; the compiled code is asked.
TILES = (
    SQUARE,
    Config(128, 192, pingpong=True),
    Config(128, 160, pingpong=True),
    Config(128, 208, pingpong=True),
    Config(192, 128, pingpong=True),
    WIDE,
    Config(256, 128),
    Config(256, 160),
    Config(256, 192),
    Config(128, 192),
)
SMALL = (Config(64, 128, pingpong=True), Config(128, 64, pingpong=True), Config(64, 256, pingpong=True))
CLUSTERS = ((2, 1), (1, 2))
SWIZZLES = (4, 16)
CROWDED = 5  # tiles that an epilogue loads and stores
FULL = 192  # accumulator registers a thread from which a rich epilogue spills, unless its subtiles are narrow
ROOMY = 208  # from which QuACK itself gives the MMA warps more registers


def candidates(lowered: Lowered, k: int = 0, rows: int = BUCKETS[-1]) -> list[Config]:
    """The configurations known to be good for a program, the cheapest first by a rough model. Behind an epilogue that
    does much, cooperative tiles come last: of 29 measured winners 28 are ping-pong, where the model, which knows only
    the bytes, would take 13 cooperative ones; such a default took 9 to 17 % more than the bare GEMM."""
    found = [c for c in _class_of(lowered) if fits(lowered, c)]
    last = (_is_rich(lowered) or _is_long(lowered)) and not _is_of_softmaxes(lowered)
    return sorted(found, key=lambda c: (last and not c.pingpong, cost(lowered, c, k, rows))) if k else found


def _class_of(lowered: Lowered) -> tuple[Config, ...]:
    if lowered.mode == "pair":
        return PAIR
    if lowered.statistics or any(s.masked for s in lowered.sinks):
        return WIDE_HEADS if lowered.statistics and lowered.half >= 64 else GUARDED
    if lowered.mode != "element" or lowered.grain or any(o.inside for o in lowered.operands):
        return HALVES
    if _is_of_softmaxes(lowered):
        return SOFTMAXES
    if any(s.kind in ("lse", "select") for s in lowered.sinks) or any(o.kind == "hit" for o in lowered.operands):
        crowded = lowered.stores and len(lowered.sinks) > 1 and (lowered.operands or "round_" not in lowered.source)
        return LOSS[1:] if crowded else LOSS  # 128x160 spills there
    return _by_what_it_moves(lowered)


def _by_what_it_moves(lowered: Lowered) -> tuple[Config, ...]:
    ways = {s.over_rows for s in lowered.sinks}
    if len(lowered.stores) > 2 and len(ways) < 2:
        return GATED
    if any(ways):
        return SUMS
    if len(lowered.sinks) > 1 or traffic(lowered) > CROWDED:
        return STREAM[1:]  # 128x192 spills there
    if _is_rich(lowered):
        return STREAM
    return (SQUARE, WIDE) if _is_long(lowered) and traffic(lowered) > 1 else PLAIN


def _is_rich(lowered: Lowered) -> bool:
    """Whether it reduces, or moves more than two tiles."""
    return bool(lowered.sinks) or traffic(lowered) > 2


def _is_of_softmaxes(lowered: Lowered) -> bool:
    """Whether it takes several log-sum-exps, whose registers only a cooperative tile has."""
    return sum(s.kind == "lse" for s in lowered.sinks) > 1


def _is_long(lowered: Lowered) -> bool:
    return LONG.search(lowered.source) is not None


def traffic(lowered: Lowered) -> int:
    """The tiles that an epilogue loads and stores."""
    return sum(o.kind in ("tile", "table") for o in lowered.operands) + len(lowered.stores)


def cost(lowered: Lowered, config: Config, k: int, rows: int) -> float:
    """A configuration's time in arbitrary units: rounds of tiles over the GPU, times what one tile takes."""
    m, n = config.tile_m, config.tile_n
    tiles = -(-rows // (m * config.cluster_m)) * -(-lowered.cols // (n * config.cluster_n))
    tiles *= config.cluster_m * config.cluster_n
    shown = HIDDEN if config.pingpong else 1.0
    one = m * n * (1 + OPERAND_COST * (m + n) / (m * n) + shown * TILE_COST * traffic(lowered) / k)
    return -(-tiles // SMS) * one


# --- what tuning tries ------------------------------------------------------------------------------------------------


def space(lowered: Lowered, k: int, rows: int = BUCKETS[-1]) -> list[Config]:
    """The tiles to time first, each with the subtiles that may suit it; those that should be good come first."""
    few = rows * lowered.cols < 2 * SMS * SQUARE.tile_m * SQUARE.tile_n
    tried = [v for t in (*TILES, *(SMALL if few else ())) for v in _variants(lowered, t)]
    order = [*candidates(lowered, k, rows), *sorted(tried, key=lambda c: cost(lowered, c, k, rows))]
    return [c for c in dict.fromkeys(order) if fits(lowered, c)]


def _variants(lowered: Lowered, tile: Config) -> Iterator[Config]:
    """With little to do a narrow subtile gains nothing; a lane's store would be 8 columns wide."""
    rich, full = traffic(lowered) + len(lowered.sinks) > 2, accumulators(tile) >= FULL
    if lowered.mode == "pair" or not (rich and full):
        yield tile
    if lowered.mode != "pair" and rich:
        yield replace(tile, narrow=True)
        if FULL <= accumulators(tile) < ROOMY:
            yield replace(tile, narrow=True, more_registers=True)


def accumulators(config: Config) -> int:
    """The registers that a thread's part of the accumulator takes."""
    groups = 1 if config.pingpong else 3 if (config.tile_m, config.tile_n) == (192, 128) else 2
    return config.tile_m * config.tile_n // (128 * groups)


def neighbours(lowered: Lowered, config: Config) -> list[Config]:
    """What a good tile is tried with next: the other scheduler, the other cluster, other orders of tiles."""
    turned = [replace(config, cluster_m=m, cluster_n=n) for m, n in CLUSTERS]
    found = [replace(c, dynamic=d) for c in turned for d in (True, False)]
    found += [replace(config, swizzle=s) for s in SWIZZLES]
    return [c for c in dict.fromkeys(found) if c != config and fits(lowered, c)]
