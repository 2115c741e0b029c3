"""Which tile a program's kernel uses by default: the first candidate that fits it and is known not to spill."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from codetta.backends.hopper.lowered import Lowered


@dataclass(frozen=True, slots=True)
class Config:
    """A CTA tile, whether two warp groups take turns (ping-pong) or share a tile, and the width of the epilogue's
    subtile (16 columns if ``narrow``, else QuACK's own)."""

    tile_m: int
    tile_n: int
    pingpong: bool = False
    narrow: bool = False
    cluster_m: int = 2
    cluster_n: int = 1


SUBTILE = 32  # QuACK's epilogue subtile on SM90, in columns
NARROW = 16  # ours: half as many values are alive at once, so that rich epilogues do not spill

PAIR = (Config(128, 256), Config(128, 128, pingpong=True))
LOSS = (Config(128, 256, narrow=True), Config(128, 128, pingpong=True, narrow=True))
STREAM = (Config(128, 192, pingpong=True, narrow=True), Config(128, 128, pingpong=True, narrow=True))
SUMS = (Config(128, 128, pingpong=True, narrow=True), Config(128, 128, pingpong=True))
GATED = (Config(128, 128, pingpong=True), Config(128, 256, narrow=True))
PLAIN = (Config(128, 256), Config(128, 128, pingpong=True))
HALVES = (
    Config(128, 128, pingpong=True),
    Config(128, 128, pingpong=True, narrow=True),
    Config(128, 192, pingpong=True, narrow=True),
    Config(128, 64, pingpong=True, narrow=True),
)


def candidates(lowered: Lowered) -> list[Config]:
    """The configurations that a program can run with, the default first."""
    return [c for c in _class_of(lowered) if fits(lowered, c)]


def _class_of(lowered: Lowered) -> tuple[Config, ...]:
    if lowered.mode == "pair":
        return PAIR
    if lowered.mode == "halves" or lowered.grain or any(o.inside for o in lowered.operands):
        return HALVES
    if any(s.kind in ("lse", "select") for s in lowered.sinks):
        return LOSS
    if len(lowered.stores) > 2:
        return GATED
    if any(s.over_rows for s in lowered.sinks):
        return SUMS
    tiles = sum(o.kind == "tile" for o in lowered.operands)
    return STREAM if lowered.sinks or tiles + len(lowered.stores) > 2 else PLAIN


def subtile(config: Config) -> int:
    """The columns of an epilogue subtile."""
    return gcd(config.tile_n, NARROW if config.narrow else SUBTILE)


def fits(lowered: Lowered, config: Config) -> bool:
    """Whether ranges of columns, tables and heads begin and end where tiles and their subtiles do."""
    if lowered.grain % config.tile_n or (lowered.whole_tiles and lowered.cols % config.tile_n):
        return False
    inside = [o.inside for o in lowered.operands if o.inside]
    heads = [2 * lowered.half] if lowered.mode == "halves" else []
    return all(config.tile_n % d == 0 for d in (*inside, *heads)) and all(
        d % subtile(config) == 0 for d in (*inside, *(h // 2 for h in heads))
    )
