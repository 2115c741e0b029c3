"""What a kernel is compiled with: its tile, its cluster, how warps share the work. And which rows count as alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import gcd
from typing import Any

from codetta.backends.hopper.lowered import Lowered
from codetta.errors import SettingsError

SUBTILE = 32  # QuACK's epilogue subtile on SM90, in columns
NARROW = 16  # ours: half as many values are alive at once, so that rich epilogues do not spill
MMA_REGISTERS = (("num_regs_load", 24), ("num_regs_mma", 240))  # QuACK's own on SM90: 40 and 232

# A configuration serves every number of rows up to a bucket's; the last bucket takes all that is larger.
BUCKETS = (512, 2048, 8192, 16_384)


@dataclass(frozen=True, slots=True)
class Config:
    """A CTA tile, whether two warp groups take turns (ping-pong) or share a tile, and the width of the epilogue's
    subtile (16 columns if ``narrow``, else QuACK's own).

    ``dynamic``: a cluster takes its next tile from a counter in memory, not from a fixed stride. ``more_registers``:
    240 a thread for the MMA warps, and 24 for the one that loads. ``tile_k`` 0 is QuACK's own, 64 in 16 bits.
    ``swizzle``: how many clusters wide a group of tiles is that are worked on together; no part of the compiled
    kernel."""

    tile_m: int
    tile_n: int
    pingpong: bool = False
    narrow: bool = False
    cluster_m: int = 2
    cluster_n: int = 1
    dynamic: bool = False
    more_registers: bool = False
    tile_k: int = 0
    swizzle: int = 8

    def __str__(self) -> str:
        traits = {
            "pp": self.pingpong,
            "narrow": self.narrow,
            "dyn": self.dynamic,
            "regs": self.more_registers,
            f"k{self.tile_k}": self.tile_k,
            f"cl{self.cluster_m}{self.cluster_n}": (self.cluster_m, self.cluster_n) != (2, 1),
            f"sw{self.swizzle}": self.swizzle != 8,
        }
        return " ".join([f"{self.tile_m}x{self.tile_n}", *(name for name, on in traits.items() if on)])

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults, and the tile."""
        plain = asdict(Config(self.tile_m, self.tile_n))
        return {k: v for k, v in asdict(self).items() if k in ("tile_m", "tile_n") or v != plain[k]}

    @staticmethod
    def from_json(found: dict[str, Any]) -> Config:
        """Back from JSON; SettingsError for what is no configuration."""
        types = {f.name: f.type for f in fields(Config)}
        wrong = [k for k, v in found.items() if types.get(k) != type(v).__name__]
        if wrong or not {"tile_m", "tile_n"} <= found.keys():
            raise SettingsError(f"{found} is no configuration", hint="codetta tune writes such tables")
        return Config(**found)


def bucket(rows: int | None) -> int:
    """The bucket that a number of rows belongs to; None, a number that is not known, is a training step's."""
    return next((b for b in BUCKETS if rows is not None and rows <= b), BUCKETS[-1])


def subtile(config: Config) -> int:
    """The columns of an epilogue subtile."""
    return gcd(config.tile_n, NARROW if config.narrow else SUBTILE)


def fits(lowered: Lowered, config: Config) -> bool:
    """Whether ranges of columns, tables and heads begin and end where tiles and their subtiles do."""
    if lowered.grain % config.tile_n:
        return False
    if lowered.mode == "pair" and config.tile_n % SUBTILE:  # each lane's store takes half a subtile
        return False
    wide = subtile(config)
    tables = [o.inside for o in lowered.operands if o.kind == "table" and not o.spread]
    halves = [lowered.half] if lowered.mode == "halves" else []
    groups = [s.inside for s in lowered.statistics]
    spread = [o.inside * (2 if o.kind == "table" else 1) for o in lowered.operands if o.kind == "group" or o.spread]
    return (
        all(config.tile_n % d == 0 for d in (*tables, *groups, *spread, *(2 * h for h in halves)))
        and all(d % wide == 0 for d in (*tables, *halves))
        and all(max(d, wide) % min(d, wide) == 0 and lowered.cols % d == 0 for d in groups)
    )
