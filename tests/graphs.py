"""Random graphs that are no Llama: linears, norms, maps, pairs, rotations, reductions, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from codetta.core.node import Node
from codetta.core.types import DType, Kind, Type, colvec, f64, groupvec, i32, rowvec, scalar, table, tile
from codetta.ir import build, ops
from codetta.ir.build import add, apply, cast, div, input_, join, matmul, mul, neg, parts, reduce, sub, sum_row, where
from codetta.ir.graph import Graph
from codetta.ir.split import ADJACENT, Split, columns, halves

T = TypeVar("T")
WIDTHS = (4, 8, 12)
CURVES = (ops.TANH, ops.SILU, ops.SIGMOID, ops.GELU, ops.NEG)


# --- what models are made of ----------------------------------------------------------------------------------------


def width(x: Node) -> int:
    """The column count."""
    assert isinstance(x.type.cols, int)
    return x.type.cols


def rms_norm(x: Node, gain: Node | None) -> Node:
    """RMSNorm as a model spells it: statistic, scale, round, gain."""
    r = apply(ops.RSQRT, add(mul(sum_row(mul(x, x)), 1 / width(x)), 1e-5))
    h = cast(mul(x, r), x.type.dtype)
    return h if gain is None else cast(mul(gain, h), x.type.dtype)


def layer_norm(x: Node, gain: Node | None, bias: Node | None) -> Node:
    """LayerNorm as PyTorch defines it: mean, centred squares."""
    d = sub(x, mul(sum_row(x), 1 / width(x)))
    h = mul(d, apply(ops.RSQRT, add(mul(sum_row(mul(d, d)), 1 / width(x)), 1e-5)))
    h = h if gain is None else mul(h, gain)
    return cast(h if bias is None else add(h, bias), x.type.dtype)


def rope_halves(x: Node, cos: Node, sin: Node, groups: int) -> Node:
    """Hugging Face's rotation: the halves of each head."""
    a, b = parts(x, halves(groups))
    return add(mul(x, cos), mul(join(halves(groups), neg(b), a), sin))


def rope_adjacent(x: Node, cos: Node, sin: Node) -> Node:
    """Meta's rotation: neighbouring columns."""
    a, b = parts(x, ADJACENT)
    return join(ADJACENT, sub(mul(a, cos), mul(b, sin)), add(mul(a, sin), mul(b, cos)))


# --- drawing --------------------------------------------------------------------------------------------------------


@dataclass
class Draw:
    """A graph in the making: its inputs, and the Tiles made so far."""

    random: Random
    dtype: DType = f64
    inputs: list[Node] = field(default_factory=list)
    tiles: list[Node] = field(default_factory=list)

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.random.randrange(len(items))]

    def chance(self, percent: int) -> bool:
        """True as often as that; False is the simpler case."""
        return self.random.randrange(100) >= 100 - percent

    def leaf(self, type_: Type, prefix: str) -> Node:
        """A fresh input, of the graph's dtype unless it is an integer."""
        type_ = type_.of(self.dtype) if type_.dtype.is_float else type_
        self.inputs.append(input_(f"{prefix}{len(self.inputs)}", type_))
        return self.inputs[-1]

    def tile(self, cols: int) -> Node:
        """A Tile of that width: one made before, or a fresh one."""
        known = [t for t in self.tiles if t.type.cols == cols]
        return self.pick(known) if known and self.chance(80) else self.leaf(tile(cols), "x")

    def weight(self, rows: int, cols: int) -> Node:
        """A weight; now and then one that is used before, or made of others by a map."""
        known = [n for n in self.inputs if n.type == tile(cols, self.dtype, rows=rows)]
        if known and self.chance(20):
            return self.pick(known)
        w = self.leaf(tile(cols, rows=rows), "w")
        return cast(mul(w, self.leaf(rowvec(cols), "g")), self.dtype) if self.chance(5) else w

    def maybe(self, percent: int, type_: Type, prefix: str) -> Node | None:
        """An input, or nothing."""
        return self.leaf(type_, prefix) if self.chance(percent) else None


Step = Callable[[Draw, Node], Node]


def linear(d: Draw, x: Node) -> Node:
    """A GEMM, sometimes with a bias. The product is scaled, so that nothing saturates."""
    out = d.pick(WIDTHS)
    z = matmul(x, d.weight(out, width(x))) if d.chance(85) else matmul(x, d.weight(width(x), out), "nn")
    z = cast(mul(z, 0.4) if d.chance(60) else z, d.dtype)
    bias = d.maybe(25, rowvec(out), "b")
    return z if bias is None else cast(add(z, bias), d.dtype)


def siblings(d: Draw, x: Node) -> Node:
    """Two GEMMs of one operand, of one width or two, made one again."""
    a, b = linear(d, x), linear(d, x)
    return mul(a, b) if width(a) == width(b) else join(columns(width(a), width(b)), a, b)


def curve(d: Draw, x: Node) -> Node:
    """An elementwise function of one argument."""
    return apply(d.pick(CURVES), x)


def residual(d: Draw, x: Node) -> Node:
    """Two Tiles combined."""
    a, b = (x, d.tile(width(x))) if d.chance(50) else (d.tile(width(x)), x)
    return d.pick((add, add, sub, mul))(a, b)


def vector(d: Draw, x: Node) -> Node:
    """A Tile and a vector, a number per group, a table or a number, in either order."""
    n = width(x)
    v = d.leaf(d.pick((rowvec(n), colvec(), groupvec(2), table(n // 2), scalar())), "v")
    f = d.pick((add, sub, mul, mul))
    if d.chance(15):
        return f(x, d.pick((2.0, -0.5, 0.0, 1.0)))
    return f(x, v) if d.chance(70) else f(v, x)


def rms(d: Draw, x: Node) -> Node:
    """RMSNorm with a random gain or none."""
    return rms_norm(x, d.maybe(80, rowvec(width(x)), "g"))


def layer(d: Draw, x: Node) -> Node:
    """LayerNorm with gain and bias, or without."""
    return layer_norm(x, d.maybe(80, rowvec(width(x)), "g"), d.maybe(50, rowvec(width(x)), "b"))


def head_norm(d: Draw, x: Node) -> Node:
    """A norm over the inside of each group, as for q and k."""
    ssq = reduce(mul(x, x), "sum", Kind.GROUPVEC, 2)
    h = mul(x, apply(ops.RSQRT, add(mul(ssq, 2 / width(x)), 1e-4)))
    gain = d.maybe(30, table(width(x) // 2), "t")
    return h if gain is None else mul(h, gain)


def gated(d: Draw, x: Node) -> Node:
    """The lanes of a pair combined: half as wide."""
    if width(x) % 8:
        return curve(d, x)
    a, b = parts(x, d.pick((halves(), halves(2), ADJACENT)))
    return mul(apply(ops.SILU, a), b) if d.chance(70) else add(a, b)


def rotated(d: Draw, x: Node) -> Node:
    """RoPE, in the halves or the adjacent pairing."""
    groups = d.pick((1, 2))
    inside = width(x) // groups
    if d.chance(50):
        return rope_halves(x, d.leaf(table(inside), "t"), d.leaf(table(inside), "t"), groups)
    return rope_adjacent(x, d.leaf(table(inside // 2), "t"), d.leaf(table(inside // 2), "t"))


def ranges(d: Draw, x: Node) -> Node:
    """Columns in ranges, each treated by itself, sometimes in another order."""
    n = width(x)
    how = d.pick((columns(1, n - 1), Split(1, 4), columns(n // 2 - 1, 1, n // 2), Split(2, 2)))
    first, *rest = parts(x, how)
    found = [apply(d.pick(CURVES), first), *rest]
    if d.chance(20):
        return join(how, found[0], *(0.0 for _ in rest))
    return join(how, *(reversed(found) if how.sizes is None and d.chance(30) else found))


def softmax(d: Draw, x: Node) -> Node:
    """exp(x - lse)."""
    return apply(ops.EXP, sub(x, build.logsumexp_row(x)))


def picked(d: Draw, x: Node) -> Node:
    """A column per row, added to the row."""
    return add(x, build.select_column(x, d.leaf(colvec(i32), "i")))


def across_rows(d: Draw, x: Node) -> Node:
    """A sum or largest value over the rows feeds back into another Tile, or the same."""
    v = reduce(x, d.pick(("sum", "max")), d.pick((Kind.ROWVEC, Kind.SCALAR)))
    return mul(d.tile(width(x)), apply(ops.TANH, v))


def row_statistic(d: Draw, x: Node) -> Node:
    """A row's largest value, or its sum over an unrelated Tile, scales a Tile."""
    v = reduce(x, d.pick(("sum", "max", "absmax")), Kind.COLVEC)
    return mul(d.tile(d.pick(WIDTHS)), apply(d.pick((ops.TANH, ops.SIGMOID, ops.NEG)), v))


def clipped(d: Draw, x: Node) -> Node:
    """relu, or a choice between Tiles."""
    low, high = apply(ops.LE, x, 0.0), apply(ops.GT, x, 0.1)
    return where(low, 0.0, x) if d.chance(50) else where(high, d.tile(width(x)), mul(x, 0.5))


def turned(d: Draw, x: Node) -> Node:
    """Two reductions of one Tile over different axes, met in a Tile again."""
    return add(sum_row(x), apply(ops.TANH, build.sum_col(x)))


def divided(d: Draw, x: Node) -> Node:
    """A Tile over a positive number per row, or over another Tile."""
    below = sum_row(mul(x, x)) if d.chance(50) else mul(x, x)
    return div(d.tile(width(x)), add(below, 1.0))


USUAL: tuple[Step, ...] = (linear, linear, linear, linear, siblings, curve, residual, residual, vector, rms, layer)
ACROSS_ROWS: tuple[Step, ...] = (across_rows, turned)  # a largest value of no rows does not exist
ODD: tuple[Step, ...] = (head_norm, gated, rotated, ranges, softmax, picked, row_statistic, clipped, divided)
NORMS: tuple[Step, ...] = (linear, linear, rms, layer, rms, curve, residual, vector, gated, rotated, siblings)


def vectors(d: Draw, x: Node) -> list[Node]:
    """Outputs that are no Tiles, of Tiles and of inputs alone, and a weight's."""
    w, g, v = d.leaf(tile(4, rows=6), "w"), d.leaf(rowvec(width(x)), "g"), d.leaf(colvec(), "v")
    made = (
        *(g, v, w, d.leaf(scalar(), "s"), mul(w, 2.0), apply(ops.TANH, g), mul(apply(ops.SIGMOID, v), 2.0)),
        mul(d.leaf(table(width(x) // 2), "t"), v),
        reduce(w, "sum", Kind.SCALAR),
        reduce(x, "sum", Kind.GROUPVEC, 2),
        reduce(x, "absmax", Kind.TABLE, 2),
        reduce(x, "sum", Kind.SCALAR),
        build.sum_col(apply(ops.TANH, x)),
        build.logsumexp_row(x),
        mul(build.select_column(x, d.leaf(colvec(i32), "i")), v),
    )
    return [d.pick(made) for _ in range(d.random.randrange(1, 4))]


def draw(
    random: Random, steps: Sequence[Step] = USUAL + ODD + ACROSS_ROWS, most: int = 10, dtype: DType = f64
) -> Graph:
    """A random graph: outputs anywhere and of any kind, values used twice, unused inputs, an output that is an input
    or is given twice."""
    d = Draw(random, dtype)
    d.tiles.append(d.leaf(tile(d.pick(WIDTHS)), "x"))
    for _ in range(random.randrange(1, most)):
        x = d.tiles[-1] if d.chance(70) else d.pick(d.tiles)
        d.tiles.append(cast(d.pick(steps)(d, x), dtype))
    chosen = [d.tiles[-1], *(t for t in d.tiles[:-1] if d.chance(20))]
    if d.chance(15):
        chosen.append(chosen[0])
    if d.chance(15):
        chosen += vectors(d, d.tiles[-1])
    return Graph(tuple(d.inputs), tuple((f"y{i}", t) for i, t in enumerate(chosen)))


# --- the segment of a Llama between two attentions ------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """A Llama's: width, ffn, query and key/value heads, and the width of a head."""

    d: int = 24
    ffn: int = 36
    heads: int = 4
    kv_heads: int = 2
    inside: int = 6


def llama_segment(dtype: DType, sizes: Sizes = Sizes(), bias: bool = False, adjacent: bool = False) -> Graph:
    """From attention's output y and the residual x to the next attention's q, k, v: o-projection, norm, SwiGLU, down
    projection, norm, q, k, v and their rotation, each operator rounding as PyTorch's does."""
    d, q, kv = sizes.d, sizes.heads * sizes.inside, sizes.kv_heads * sizes.inside
    inputs = [input_("y", tile(q, dtype)), input_("x", tile(d, dtype))]

    def leaf(key: str, type_: Type) -> Node:
        inputs.append(input_(key, type_.of(dtype)))
        return inputs[-1]

    def linear(x: Node, key: str, out: int) -> Node:
        z = matmul(x, leaf(f"w{key}", tile(width(x), rows=out)))
        return cast(add(z, leaf(f"b{key}", rowvec(out))) if bias else z, dtype)

    def rotated(x: Node, groups: int) -> Node:
        turned = rope_adjacent(x, cos, sin) if adjacent else rope_halves(x, cos, sin, groups)
        return cast(turned, dtype)

    x1 = cast(add(inputs[1], linear(inputs[0], "o", d)), dtype)
    h1 = rms_norm(x1, leaf("g1", rowvec(d)))
    gate, up = linear(h1, "g", sizes.ffn), linear(h1, "u", sizes.ffn)
    x2 = cast(add(x1, linear(cast(mul(apply(ops.SILU, gate), up), dtype), "d", d)), dtype)
    h2 = rms_norm(x2, leaf("g2", rowvec(d)))
    cos, sin = (leaf(key, table(sizes.inside // 2 if adjacent else sizes.inside)) for key in ("cos", "sin"))
    outputs = {
        "x2": x2,
        "q": rotated(linear(h2, "q", q), sizes.heads),
        "k": rotated(linear(h2, "k", kv), sizes.kv_heads),
        "v": linear(h2, "v", kv),
    }
    return Graph(tuple(inputs), tuple(outputs.items()))


def trained(graph: Graph) -> list[str]:
    """The inputs of a segment that have gradients: all but the tables."""
    return [str(n.attrs[0]) for n in graph.inputs if n.attrs[0] not in ("cos", "sin")]
