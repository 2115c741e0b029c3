"""Random graphs that are no Llama: linears, norms, maps, pairs, rotations, reductions, in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import twin
from torch import Tensor
from twin import Twin

from codetta.backends.reference.evaluate import TORCH
from codetta.core.types import DType, Kind, Type, colvec, f64, groupvec, i32, rowvec, scalar, table, tile
from codetta.ir.graph import Graph
from codetta.ir.split import ADJACENT, Split, columns, halves

WIDTHS = (4, 8, 12)
CURVES = (twin.tanh, twin.silu, twin.sigmoid, twin.gelu, twin.neg)


@dataclass
class Draw:
    """A graph in the making: its inputs, and the Tiles made so far."""

    random: Random
    rows: int = 5
    dtype: DType = f64
    inputs: dict[str, Twin] = field(default_factory=dict)
    tiles: list[Twin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.torch = torch.Generator().manual_seed(self.random.randrange(2**31))

    def pick(self, items: Sequence[Any]) -> Any:
        """One of the items."""
        return items[self.random.randrange(len(items))]

    def chance(self, percent: int) -> bool:
        """True as often as that."""
        return self.random.randrange(100) >= 100 - percent

    def leaf(self, type_: Type, prefix: str, size: float = 1.0, shift: float = 0.0) -> Twin:
        """A fresh input, normally distributed."""
        value = torch.randn(twin.shape(type_, self.rows), generator=self.torch, dtype=torch.float64) * size + shift
        value = value.to(TORCH[type_.dtype]).double()
        made = twin.leaf(f"{prefix}{len(self.inputs)}", type_, value)
        self.inputs[str(made.node.attrs[0])] = made
        return made

    def index(self, high: int) -> Twin:
        """An integer ColVec below ``high``, sometimes out of range."""
        value = torch.randint(-1, high, (self.rows,), generator=self.torch, dtype=torch.int32)
        made = twin.leaf(f"i{len(self.inputs)}", colvec(i32), value)
        self.inputs[str(made.node.attrs[0])] = made
        return made

    def tile(self, cols: int) -> Twin:
        """A Tile of that width: one made before, or a fresh one."""
        known = [t for t in self.tiles if t.cols == cols]
        return self.pick(known) if known and self.chance(80) else self.leaf(tile(cols, self.dtype), "x")

    def weight(self, rows: int, cols: int) -> Twin:
        """A weight; now and then one that is used before, or made of others by a map."""
        known = [t for n, t in self.inputs.items() if n[0] == "w" and (t.node.type.rows, t.cols) == (rows, cols)]
        if known and self.chance(20):
            return self.pick(known)
        w = self.leaf(tile(cols, self.dtype, rows=rows), "w", cols**-0.5)
        return twin.cast(w * self.leaf(rowvec(cols, self.dtype), "g", 0.3, 1.0), self.dtype) if self.chance(5) else w


# --- steps: each makes a Tile of a Tile ---------------------------------------------------------------------------------


def linear(d: Draw, x: Twin) -> Twin:
    """A GEMM with a fresh weight, sometimes with a bias."""
    out = d.pick(WIDTHS)
    z = twin.matmul(x, d.weight(out, x.cols)) if d.chance(85) else twin.matmul(x, d.weight(x.cols, out), "nn")
    z = twin.cast(z, d.dtype)
    return twin.cast(z + d.leaf(rowvec(out, d.dtype), "b"), d.dtype) if d.chance(25) else z


def siblings(d: Draw, x: Twin) -> Twin:
    """Two GEMMs of one operand, of one width or two, made one again."""
    a, b = linear(d, x), linear(d, x)
    return a * b if a.cols == b.cols else twin.join(columns(a.cols, b.cols), a, b)


def curve(d: Draw, x: Twin) -> Twin:
    """An elementwise function of one argument."""
    return d.pick(CURVES)(x)


def residual(d: Draw, x: Twin) -> Twin:
    """Two Tiles combined."""
    return d.pick((twin.add, twin.add, twin.sub, twin.mul))(*d.pick(((x, d.tile(x.cols)), (d.tile(x.cols), x))))


def vector(d: Draw, x: Twin) -> Twin:
    """A Tile and a vector, a number per group, a table or a number, in either order."""
    kinds = (rowvec(x.cols, d.dtype), colvec(d.dtype), groupvec(2, d.dtype), table(x.cols // 2, d.dtype), scalar(d.dtype))
    v = d.leaf(d.pick(kinds), "v") if d.chance(85) else d.pick((2.0, -0.5, 0.0, 1.0))
    f = d.pick((twin.add, twin.sub, twin.mul, twin.mul))
    return f(x, v) if d.chance(70) else f(v, x)


def rms(d: Draw, x: Twin) -> Twin:
    """RMSNorm with a random gain or none."""
    return twin.rms_norm(x, d.leaf(rowvec(x.cols, d.dtype), "g", 0.3, 1.0) if d.chance(80) else None, d.dtype)


def layer(d: Draw, x: Twin) -> Twin:
    """LayerNorm with gain and bias, or without."""
    gain = d.leaf(rowvec(x.cols, d.dtype), "g", 0.3, 1.0) if d.chance(80) else None
    bias = d.leaf(rowvec(x.cols, d.dtype), "b") if d.chance(50) else None
    return twin.layer_norm(x, gain, bias, d.dtype)


def head_norm(d: Draw, x: Twin) -> Twin:
    """A norm over the inside of each group, as for q and k."""
    r = twin.rsqrt(twin.reduce(x * x, "sum", Kind.GROUPVEC, 2) * (2 / x.cols) + 1e-4)
    return x * r * d.leaf(table(x.cols // 2, d.dtype), "t") if d.chance(30) else x * r


def gated(d: Draw, x: Twin) -> Twin:
    """The lanes of a pair multiplied: half as wide."""
    if x.cols < 8 or x.cols % 8:
        return curve(d, x)
    a, b = twin.parts(x, d.pick((halves(), halves(2), ADJACENT)))
    return twin.silu(a) * b if d.chance(70) else a + b


def rotated(d: Draw, x: Twin) -> Twin:
    """RoPE, in the halves or the adjacent pairing."""
    groups = d.pick((1, 2))
    inside = x.cols // groups
    if d.chance(50):
        cos, sin = (d.leaf(table(inside, d.dtype), "t") for _ in range(2))
        a, b = twin.parts(x, halves(groups))
        return x * cos + twin.join(halves(groups), -b, a) * sin
    cos, sin = (d.leaf(table(inside // 2, d.dtype), "t") for _ in range(2))
    a, b = twin.parts(x, ADJACENT)
    return twin.join(ADJACENT, a * cos - b * sin, a * sin + b * cos)


def ranges(d: Draw, x: Twin) -> Twin:
    """Columns in ranges, each treated by itself, sometimes in another order."""
    how = d.pick((columns(1, x.cols - 1), Split(1, 4), columns(x.cols // 2 - 1, 1, x.cols // 2), Split(2, 2)))
    found = twin.parts(x, how)
    found[0] = d.pick(CURVES)(found[0])
    if d.chance(20):
        return twin.join(how, *[0.0 if i else p for i, p in enumerate(found)])
    if how.sizes is None and d.chance(30):
        found.reverse()
    return twin.join(how, *found)


def softmax(d: Draw, x: Twin) -> Twin:
    """exp(x - lse)."""
    return twin.MAPS[twin.ops.EXP](x - twin.logsumexp_row(x))


def picked(d: Draw, x: Twin) -> Twin:
    """A column per row, added to the row."""
    return x + twin.select_column(x, d.index(x.cols))


def across_rows(d: Draw, x: Twin) -> Twin:
    """A sum or largest value over the rows feeds back into another Tile, or the same."""
    v = twin.reduce(x, d.pick(("sum", "max")), d.pick((Kind.ROWVEC, Kind.SCALAR)))
    return d.tile(x.cols) * twin.tanh(v)


def row_statistic(d: Draw, x: Twin) -> Twin:
    """A row's largest value, or its sum over an unrelated Tile, scales a Tile."""
    v = twin.reduce(x, d.pick(("sum", "max", "absmax")), Kind.COLVEC)
    return d.tile(d.pick(WIDTHS)) * d.pick((twin.tanh, twin.sigmoid, twin.neg))(v)


def clipped(d: Draw, x: Twin) -> Twin:
    """relu, or a choice between Tiles."""
    return twin.positive(x, 0.0, x, 0.0) if d.chance(50) else twin.positive(x, 0.1, d.tile(x.cols), x * 0.5)


def turned(d: Draw, x: Twin) -> Twin:
    """Two reductions of one Tile over different axes, met in a Tile again."""
    return twin.sum_row(x) + twin.tanh(twin.sum_col(x))


Step = Callable[[Draw, Twin], Twin]
USUAL: tuple[Step, ...] = (linear, linear, linear, linear, siblings, curve, residual, residual, vector, rms, layer)
ODD: tuple[Step, ...] = (head_norm, gated, rotated, ranges, softmax, picked, across_rows, row_statistic, clipped, turned)
NORMS: tuple[Step, ...] = (linear, linear, rms, layer, rms, curve, residual, vector, gated, rotated, siblings)


@dataclass(frozen=True)
class Drawn:
    """A graph and its values."""

    graph: Graph
    inputs: Mapping[str, Twin]
    outputs: Mapping[str, Twin]
    rows: int

    @property
    def feed(self) -> dict[str, Tensor]:
        """The inputs' values by name."""
        return {n: t.value.detach() for n, t in self.inputs.items()}


def vectors(d: Draw, x: Twin) -> list[Twin]:
    """Outputs that are no Tiles, of Tiles and of inputs alone, and a weight's."""
    w = d.leaf(tile(4, d.dtype, rows=6), "w")
    g = d.leaf(rowvec(x.cols, d.dtype), "g")
    row = d.leaf(colvec(d.dtype), "v")
    made = [
        g,
        row,
        w,
        w * 2.0,
        twin.tanh(g),
        twin.sigmoid(row) * 2.0,
        d.leaf(table(x.cols // 2, d.dtype), "t") * row,
        twin.reduce(w, "sum", Kind.SCALAR),
        twin.reduce(x, "sum", Kind.GROUPVEC, 2),
        twin.reduce(x, "absmax", Kind.TABLE, 2),
        twin.reduce(x, "max", Kind.SCALAR),
        twin.sum_col(twin.tanh(x)),
        twin.logsumexp_row(x),
        twin.select_column(x, d.index(x.cols)) * row,
        d.leaf(scalar(d.dtype), "s"),
    ]
    return [d.pick(made) for _ in range(d.random.randrange(1, 4))]


def draw(
    random: Random, steps: Sequence[Step] = USUAL + ODD, most: int = 10, rows: int = 5, dtype: DType = f64
) -> Drawn:
    """A random graph: outputs anywhere, values used twice, an unused input, an output that is an input or is given
    twice."""
    d = Draw(random, rows, dtype)
    d.tiles.append(d.leaf(tile(d.pick(WIDTHS), dtype), "x"))
    for _ in range(random.randrange(1, most)):
        x = d.tiles[-1] if d.chance(70) else d.pick(d.tiles)
        d.tiles.append(twin.cast(d.pick(steps)(d, x), dtype))
    chosen = [d.tiles[-1], *(t for t in d.tiles[:-1] if d.chance(20))]
    if d.chance(15):
        chosen.append(chosen[0])
    if d.chance(15) and steps != NORMS:
        chosen += vectors(d, d.tiles[-1])
    if d.chance(10):
        d.leaf(rowvec(4, dtype), "unused")
    return finish(d, chosen)


def finish(d: Draw, chosen: Sequence[Twin]) -> Drawn:
    """The graph of the chosen outputs."""
    outputs = {f"y{i}": t for i, t in enumerate(chosen)}
    graph = Graph(tuple(t.node for t in d.inputs.values()), tuple((n, t.node) for n, t in outputs.items()))
    return Drawn(graph, d.inputs, outputs, d.rows)


def cotangents(drawn: Drawn, seed: int = 0) -> dict[str, Tensor]:
    """Random incoming gradients, one an output."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.value.shape, generator=generator, dtype=torch.float64) for n, t in drawn.outputs.items()}


def autograd(drawn: Drawn, given: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor | None]:
    """The gradients by the named inputs, by PyTorch."""
    active = {n: t for n, t in drawn.outputs.items() if t.value.requires_grad}
    sources = [drawn.inputs[n].value for n in names]
    found = torch.autograd.grad([t.value for t in active.values()], sources, [given[n] for n in active], allow_unused=True)
    return dict(zip(names, found, strict=True))
