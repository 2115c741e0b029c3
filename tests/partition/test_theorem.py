"""The theorem: where the forward pass is GEMMs with block-local epilogues, so is the derived backward pass.

For chains and graphs of linears whose epilogues are elementwise maps (with Tiles, rows, columns, tables and numbers
loaded), pairs, rotations, forks and joins, the derived backward is data-gradient GEMMs with block-local epilogues,
weight-gradient GEMMs, and finalizes. The only leftover is the map behind the last GEMMs, whose incoming gradient no
GEMM of ours produces. That an epilogue is block-local is checked where a Program is made, and by the verifier.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

import drive
from codetta.core.node import Node, users
from codetta.core.types import colvec, rowvec, table, tile
from codetta.ir import ops
from codetta.ir.build import add, apply, join, matmul, mul, parts, sub, where
from codetta.ir.graph import Graph
from codetta.ir.split import ADJACENT, columns, halves
from codetta.partition.cut import MEMORY, Memory
from codetta.partition.plan import plan_text
from codetta.partition.training import plan_training
from graphs import Draw, Step, rope_adjacent, rope_halves, width

ROWS = 4


# --- block-local epilogues: every step makes a Tile of Tiles at the same coordinates ----------------------------------


def curve(d: Draw, x: Node) -> Node:
    """A function of one argument."""
    return apply(d.pick((ops.TANH, ops.SILU, ops.GELU, ops.GELU_TANH, ops.SIN)), x)


def row_load(d: Draw, x: Node) -> Node:
    """A bias or a gain."""
    return d.pick((add, mul))(x, d.leaf(rowvec(width(x)), "b"))


def column_load(d: Draw, x: Node) -> Node:
    """A number per token."""
    return mul(x, d.leaf(colvec(), "c"))


def tile_load(d: Draw, x: Node) -> Node:
    """A Tile from outside."""
    return d.pick((add, sub, mul))(x, d.leaf(tile(width(x)), "x"))


def table_load(d: Draw, x: Node) -> Node:
    """A table of constants, as for positions."""
    return mul(x, d.leaf(table(width(x) // 2), "k"))


def gated(d: Draw, x: Node) -> Node:
    """The lanes of a pair."""
    a, b = parts(x, d.pick((halves(), ADJACENT)))
    return mul(apply(ops.SILU, a), b)


def rotated(d: Draw, x: Node) -> Node:
    """The lanes of heads turned by an angle."""
    if d.chance(50):
        return rope_adjacent(x, *(d.leaf(table(width(x) // 4), "k") for _ in range(2)))
    return rope_halves(x, *(d.leaf(table(width(x) // 2), "k") for _ in range(2)), 2)


def ranges(d: Draw, x: Node) -> Node:
    """One range of columns treated in another way than the other."""
    how = columns(width(x) // 4, width(x) - width(x) // 4)
    a, b = parts(x, how)
    return join(how, apply(ops.TANH, a), b)


def chosen(d: Draw, x: Node) -> Node:
    """A piecewise map."""
    return where(apply(ops.GT, x, 0.0), x, mul(x, 0.1))


MAPS: tuple[Step, ...] = (curve, row_load, column_load, tile_load, table_load, gated, rotated, ranges, chosen)


def epilogue(d: Draw, z: Node, most: int) -> Node:
    """Maps behind a GEMM."""
    for _ in range(d.random.randrange(most + 1)):
        narrow = width(z) % 8 != 0
        z = d.pick([m for m in MAPS if not (narrow and m in (gated, rotated, ranges, table_load))])(d, z)
    return z


def linear(d: Draw, x: Node, out: int) -> Node:
    """A GEMM with a weight of its own, of about unit gain."""
    return mul(matmul(x, d.leaf(tile(width(x), rows=out), "w")), width(x) ** -0.5)


def chain(random: Random) -> Graph:
    """Linears, each with an epilogue; now and then a residual, or an output on the way."""
    d = Draw(random)
    x = d.leaf(tile(8), "x")
    outputs: list[Node] = []
    for _ in range(random.randrange(1, 5)):
        y = epilogue(d, linear(d, x, d.pick((8, 16))), 3)
        x = add(x, y) if width(y) == width(x) and d.chance(50) else y
        if d.chance(20):
            outputs.append(x)
    return graph_of(d, [*outputs, x])


def dag(random: Random) -> Graph:
    """Linears of any Tile made so far, their epilogues joined with any other Tile; every end is an output."""
    d = Draw(random)
    d.tiles += [d.leaf(tile(8), "x"), d.leaf(tile(16), "x")]
    for _ in range(random.randrange(2, 6)):
        y = epilogue(d, linear(d, d.pick(d.tiles), d.pick((8, 16))), 2)
        other = d.pick(d.tiles)
        if width(other) == width(y) and d.chance(60):
            y = d.pick((add, mul, sub))(y, other)
        d.tiles.append(y)
    made = d.tiles[2:]
    used = users(made)
    return graph_of(d, [t for t in made if not used[t] or d.chance(10)])


def graph_of(d: Draw, outputs: Iterable[Node]) -> Graph:
    """Inputs in order of their making, outputs once each."""
    return Graph(tuple(d.inputs), tuple((f"y{i}", n) for i, n in enumerate(dict.fromkeys(outputs))))


# --- what must come out -----------------------------------------------------------------------------------------------


def trained(graph: Graph) -> list[str]:
    """Tiles from outside, weights, gains, biases and numbers per token; tables are constants."""
    return [n for n in drive.float_inputs(graph) if not n.startswith("k")]


def expect_theorem(graph: Graph, memory: Memory) -> None:
    """Forward has a program a GEMM and no leftover. Backward has a weight gradient a GEMM, a data gradient a GEMM,
    finalizes, and no other map than of what comes from outside. (A number per token that has left its GEMM makes the
    bias next to it a sum over a weight's columns: a step on weights, forward and backward.)"""
    plan = plan_training(graph, trained(graph), memory)
    merged = len(plan.graph.contractions)
    assert plan.forward.count("gemm") == merged
    assert plan.forward.count("leftover") == 0, plan_text(plan.forward)
    weights = [s for s in plan.backward.steps if s.is_weight_gradient]
    assert len(weights) == merged
    assert plan.backward.count("gemm") == 2 * merged
    for s in plan.backward.steps:
        if s.kind == "leftover":
            made = set(s.loads) - set(plan.backward.inputs)
            assert not made, f"{s.program.name} reads {made}, which GEMMs of ours produce: {s.reason}"
            assert any(n.startswith("d_") for n in s.loads), f"{s.program.name} belongs in the forward pass"
    drive.expect_training(graph, plan, trained(graph), ROWS, 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(MEMORY))
def test_backward_of_a_chain_is_gemms_with_epilogues(random: Random, memory: Memory):
    expect_theorem(chain(random), memory)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(MEMORY))
def test_backward_of_a_graph_is_gemms_with_epilogues(random: Random, memory: Memory):
    expect_theorem(dag(random), memory)
