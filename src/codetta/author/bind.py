"""A program at real sizes as it is compiled, in float64 as it is checked, and the ragged sizes it is checked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from random import Random

from codetta.core.node import Node
from codetta.core.types import ROWS, Dim, DType, Kind, Sym, Type, bf16, f32, f64
from codetta.errors import AuthorError, CodettaError
from codetta.ir import ops
from codetta.ir.build import cast, input_
from codetta.ir.program import Gemm, Program, param_name
from codetta.ir.split import Split
from codetta.lang.sizes import at_size, at_sizes, on_leaves, symbols

INNER = "K"
DEFAULTS = {"M": 16_384, "N": 4096, INNER: 4096, "G": 32, "I": 128}
WIDE_KINDS = (Kind.TILE, Kind.ROWVEC, Kind.TABLE)  # what a model keeps in its 16-bit dtype; statistics stay float32
SMALL, CROSSING = (3, 24), (140, 330)  # columns: inside one tile, and over two or three
SCALES = (1.0, 1.0, 0.1, 4.0)  # of the GEMM's result, in turn: an activation is nearly linear near zero


@dataclass(frozen=True, slots=True)
class Draw:
    """Sizes at which a program is run, and the seed of its inputs."""

    rows: int
    sizes: Mapping[str, int]
    inner: int
    seed: int

    @property
    def scale(self) -> float:
        """How large the GEMM's result is."""
        return SCALES[self.seed % len(SCALES)]

    def __str__(self) -> str:
        found = {"M": self.rows, **self.sizes, INNER: self.inner, "seed": self.seed}
        return ", ".join(f"{name}={value}" for name, value in found.items())


def real_sizes(program: Program, given: Mapping[str, int]) -> dict[str, int]:
    """The size of each symbol of a program, of its rows and of its GEMM; AuthorError where one is not known."""
    names = {d.name for d in symbols(program)}
    unknown = given.keys() - names - {ROWS.name, INNER}
    if unknown:
        hint = f"leave it out of {program.name}_SIZES where annotations give a number, as in Tile[4096]; it has: "
        hint += ", ".join(sorted(names | {INNER}))
        raise AuthorError(f"{program.name} has no size called {', '.join(sorted(unknown))}", hint=hint)
    missing = names - given.keys() - DEFAULTS.keys()
    if missing:
        hint = f"write `{program.name}_SIZES = {{" + ", ".join(f'"{n}": ...' for n in sorted(missing)) + "}`"
        raise AuthorError(f"{program.name} is to be compiled, and {', '.join(sorted(missing))} is not known", hint=hint)
    return {name: given.get(name, DEFAULTS[name]) for name in sorted({*names, ROWS.name, INNER})}


def compiled_form(program: Program, sizes: Mapping[str, int], dtype: DType = bf16) -> Program:
    """The program at these sizes as a model runs it, rows left open.

    One that its decorator binds to a GEMM is taken as written. Any other follows ``x @ w.T`` in ``dtype``: float32
    Tiles, RowVecs and Tables are read, and Tiles are stored, in that dtype; numbers per row or group stay float32."""
    fixed = {name: size for name, size in sizes.items() if name != ROWS.name}
    if program.gemm is not None:
        leaves = [_leaf(p, at_sizes(p.type, fixed)) for p in program.params]
        bound = Gemm(program.gemm.form, at_size(program.gemm.k, fixed), program.gemm.dtype)
        return Program(program.name, program.role, tuple(leaves), on_leaves(program, leaves, fixed), bound)
    is_acc = program.role == "epilogue"
    types = [at_sizes(p.type, fixed) for p in program.params]
    leaves = [
        _leaf(p, t.of(dtype) if _is_plain(t) and not (is_acc and i == 0) else t)
        for i, (p, t) in enumerate(zip(program.params, types, strict=True))
    ]
    outputs = tuple((name, stored(n, dtype)) for name, n in on_leaves(program, leaves, fixed))
    gemm = Gemm("nt", fixed[INNER], dtype) if is_acc else None
    return Program(program.name, program.role, tuple(leaves), outputs, gemm)


def stored(n: Node, dtype: DType) -> Node:
    """An output as it is stored: a Tile for which the program names no dtype takes ``dtype``."""
    plain = n.type.kind is Kind.TILE and n.type.dtype is f32 and n.op is not ops.CAST
    return cast(n, dtype) if plain else n


def wide_form(program: Program, draw: Draw) -> Program:
    """The program at the sizes of a draw, in float64 throughout."""
    leaves = [_leaf(p, _wide(at_sizes(p.type, draw.sizes))) for p in program.params]
    form = program.gemm.form if program.gemm is not None else "nt"
    gemm = Gemm(form, draw.inner, f64) if program.role == "epilogue" else None
    return Program(program.name, program.role, tuple(leaves), on_leaves(program, leaves, draw.sizes, wide=True), gemm)


def draws(program: Program, *, quick: bool) -> Iterator[Draw]:
    """Ragged sizes: rows of 1, of 127 and at random; columns inside a tile and over several, as its splits allow."""
    random = Random(program.name)
    rows = [1, 127, random.randint(30, 120), *([] if quick else [129, random.randint(2, 29), random.randint(130, 200)])]
    fixed = program.params[0].type.rows
    inner = program.gemm.k if program.gemm is not None and isinstance(program.gemm.k, int) else None
    for seed, m in enumerate(rows):
        spread = SMALL if seed == 0 else CROSSING
        sizes = _ragged(program, random, spread)
        yield Draw(fixed if isinstance(fixed, int) else m, sizes, inner or random.randint(3, 40), seed)


def _ragged(program: Program, random: Random, spread: tuple[int, int]) -> dict[str, int]:
    unit = multiples(program)
    names = {d.name for d in symbols(program)} - {ROWS.name, INNER}
    found = {name: random.randint(2, 5) * unit.get(name, 1) for name in sorted(names & {"G", "I"})}
    for name in sorted(names - found.keys()):
        step = unit.get(name, 1) * lcm(*found.values())
        low, high = (-(-bound // step) for bound in spread)
        low = max(low, 2)  # a group of one column hides what is wrong in it: its sum is the column itself
        found[name] = step * random.randint(low, max(high, low + 2))
    return found


def multiples(program: Program) -> dict[str, int]:
    """What each symbolic size must be a multiple of, for halves, heads and parts to be whole."""
    found: dict[str, int] = {}

    def need(d: Dim | None, parts: int) -> None:
        if isinstance(d, Sym):
            found[d.name] = lcm(found.get(d.name, 1), (d.scale / parts).denominator)

    for n in [*program.params, *program.body]:
        need(n.type.rows, 1)
        need(n.type.cols, 1)
        split = n.attrs[0] if n.op in (ops.PART, ops.JOIN) else None
        if isinstance(split, Split):
            need(n.args[0].type.cols if n.op is ops.PART else n.type.cols, split.groups * split.parts)
        if n.op is ops.REDUCE and isinstance(n.attrs[2], int):
            need(n.args[0].type.cols, n.attrs[2])
    return found


def size_problem(error: CodettaError, program: Program, draw: Draw) -> AuthorError:
    """What is told where sizes that were drawn do not fit the program."""
    hint = (
        "say how sizes hang together in the annotations, as in `acc: Tile, cos: Table['N/8']` for 4 heads in halves; "
        "or give numbers: `acc: Tile[4096]`"
    )
    return AuthorError(f"{program.name} at {draw}: {error.message}", where=error.where, hint=hint)


def _leaf(p: Node, t: Type) -> Node:
    return input_(param_name(p), t)


def _wide(t: Type) -> Type:
    return t.of(f64) if t.dtype.is_float else t


def _is_plain(t: Type) -> bool:
    return t.kind in WIDE_KINDS and t.dtype is f32
