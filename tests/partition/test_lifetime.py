"""How much memory a training step needs, by its plan alone, and what may be written over what."""

from __future__ import annotations

import pytest

from codetta.core.types import bf16, colvec, f32, rowvec, tile
from codetta.ir.build import add, cast, input_, join, matmul, mul, part, sum_row
from codetta.ir.graph import Graph
from codetta.ir.split import columns, halves
from codetta.partition.build import make_plan
from codetta.partition.cut import Memory
from codetta.partition.lifetime import overwritten, peak, peak_of, private
from codetta.partition.training import TrainingPlan, plan_inference, plan_training
from graphs import Sizes, llama_segment, trained

MIB, GIB = 1 << 20, 1 << 30
SIZES = {
    "1B": (Sizes(d=2048, ffn=8192, heads=32, kv_heads=8, inside=64), 16_384),
    "8B": (Sizes(d=4096, ffn=14_336, heads=32, kv_heads=8, inside=128), 16_384),
    "70B": (Sizes(d=8192, ffn=28_672, heads=64, kv_heads=8, inside=128), 8192),
}
# GiB above the inputs of forward + backward: what a hand-written implementation of the same segment needs (fast), and
# what is asked of `lean`
BARS = {"fast": {"1B": 1.86, "8B": 3.59, "70B": 4.72}, "lean": {"1B": 1.45, "8B": 2.70, "70B": 3.15}}
# MiB: where the graph is given up, and where it is kept
PEAKS = {
    ("1B", "fast"): (1364.1, 1804.1),
    ("1B", "balanced"): (1228.1, 1740.1),
    ("1B", "lean"): (1100.1, 1612.1),
    ("8B", "fast"): (2720.2, 3456.2),
    ("8B", "balanced"): (2336.2, 3232.2),
    ("8B", "lean"): (2080.2, 2976.2),
    ("70B", "fast"): (3904.1, 4544.1),
    ("70B", "balanced"): (3456.1, 4096.1),
    ("70B", "lean"): (3200.1, 3968.1),
}


def planned(size: str, memory: Memory) -> tuple[TrainingPlan, int]:
    sizes, tokens = SIZES[size]
    graph = llama_segment(bf16, sizes)
    return plan_training(graph, trained(graph), memory), tokens


@pytest.mark.parametrize("size, memory", PEAKS)
def test_peak_of_a_llama_layer(size: str, memory: Memory):
    """Exact, so that a step that takes more is seen; and below what the hand-written one takes."""
    plan, tokens = planned(size, memory)
    given_up, kept = peak(plan, tokens), peak(plan, tokens, given_up=False)
    assert (given_up.bytes / MIB, kept.bytes / MIB) == pytest.approx(PEAKS[size, memory], abs=0.1)
    if memory in BARS:
        assert given_up.bytes <= BARS[memory][size] * GIB
    if memory == "fast":
        assert kept.bytes <= BARS[memory][size] * GIB


def test_peak_of_inference_is_less():
    """Nothing is kept: gate, up and their product are never in memory together."""
    sizes, tokens = SIZES["8B"]
    unit = tokens * sizes.d * 2
    graph = llama_segment(bf16, sizes)
    assert peak_of(plan_inference(graph), tokens) / unit == pytest.approx(5.5, rel=0.01)


def test_the_gradient_of_gate_and_up_lies_where_they_were():
    """The pre-activation is backward's alone and dies there; the stream's gradient is overwritten by the next one."""
    plan, _ = planned("8B", "lean")
    (kept,) = (name for name, n in plan.backward.buffers.items() if n == tile(2 * 14_336, bf16) and "saved" in name)
    assert kept in private(plan)
    steps = overwritten(plan.backward, private(plan))
    where = {s.program.name: over for s, over in zip(plan.backward.steps, steps, strict=True) if over}
    assert list(where) == ["wd_dgrad", "wg_wu_dgrad"]
    assert set(where["wd_dgrad"].values()) == {kept}
    assert "d_x" in where["wg_wu_dgrad"]


def test_outputs_are_never_private():
    """The stream is an output that backward reads: the user may still look at it."""
    plan, _ = planned("8B", "fast")
    held = dict(plan.saved)
    assert {held[name] for name in private(plan)}.isdisjoint(name for name, _ in plan.graph.outputs)
    assert "saved_x2" in plan.backward.inputs
    assert "saved_x2" not in private(plan)


def test_nothing_returned_lies_in_what_was_given_up():
    plan, _ = planned("8B", "fast")
    returned = {v.buffer for _, v in plan.backward.outputs}
    everything = frozenset(plan.backward.inputs)
    for over in overwritten(plan.backward, everything):
        assert all(store not in returned for store, load in over.items() if load in everything)


# --- which elements a tile reads, and which it writes -----------------------------------------------------------------

X = input_("x", tile(64, bf16))
W = input_("w", tile(64, bf16, rows=64))
NEXT = input_("next", tile(64, bf16, rows=64))
R, G = input_("r", colvec(f32)), input_("g", rowvec(64, f32))


def over(*nodes: object, wide: bool = False) -> dict[str, str]:
    """What is written over a private input ``z`` by the epilogue that makes these values of it."""
    outputs = tuple((f"out{i}", n) for i, n in enumerate(nodes))
    inputs = (X, W, *([ZZ] if wide else [Z]), R, G)
    plan = make_plan(Graph(inputs, outputs))
    found: dict[str, str] = {}
    for step in overwritten(_returning_nothing(plan), {"z"}):
        found |= step
    return found


def _returning_nothing(plan):
    """Only outputs that are returned may not lie in what was given up; here none is."""
    return type(plan)(plan.inputs, (), plan.steps, plan.buffers, plan.partials)


Z, ZZ = input_("z", tile(64, bf16)), input_("z", tile(128, bf16))
ACC = matmul(X, W)


def test_whole_over_whole():
    assert over(cast(add(mul(ACC, R), Z), bf16)) == {"out0": "z"}


def test_lanes_over_the_same_lanes():
    a, b = (part(ZZ, halves(), i) for i in range(2))
    assert over(cast(mul(join(halves(), mul(ACC, b), mul(ACC, a)), R), bf16), wide=True) == {"out0": "z"}


def test_another_type_is_not_written_over():
    assert over(add(mul(ACC, R), Z)) == {}


def test_columns_that_move_are_not_written_over():
    """One tile would overwrite what another still reads."""
    a, b = (part(Z, halves(), i) for i in range(2))
    assert over(cast(add(ACC, join(halves(), b, a)), bf16)) == {}
    c, d = (part(ZZ, columns(32, 96), i) for i in range(2))
    e, f = (part(ACC, columns(32, 32), i) for i in range(2))
    assert over(cast(join(halves(), mul(e, c), f), bf16), cast(d, bf16), wide=True) == {}


def test_a_gemms_operand_is_not_written_over():
    """Every tile of the output reads all of it."""
    square = matmul(Z, W)
    assert over(cast(add(square, Z), bf16)) == {}


def test_one_buffer_for_one_store():
    found = over(cast(add(ACC, Z), bf16), cast(mul(ACC, Z), bf16), sum_row(mul(ACC, Z)))
    assert found in ({"out0": "z"}, {"out1": "z"})
