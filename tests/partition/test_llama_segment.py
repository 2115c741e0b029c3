"""The segment of a Llama between two attentions: exact counts, values, and the bytes of a hand count."""

from __future__ import annotations

import pytest

import drive
from codetta.core.types import DType, bf16, f16, f32, f64
from codetta.lang.source import program_text
from codetta.partition.cost import plan_cost
from codetta.partition.cut import MEMORY, Memory
from codetta.partition.plan import Plan
from codetta.partition.training import TrainingPlan, plan_boundary_fusion, plan_inference, plan_training
from graphs import Sizes, llama_segment, trained

KINDS = ("gemm", "finalize", "leftover", "prepare")


def counts(plan: Plan) -> dict[str, int]:
    return {kind: plan.count(kind) for kind in KINDS}


def planned(
    dtype: DType = bf16, memory: Memory = "balanced", bias: bool = False, adjacent: bool = False
) -> TrainingPlan:
    graph = llama_segment(dtype, bias=bias, adjacent=adjacent)
    return plan_training(graph, trained(graph), memory)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [bf16, f64])
def test_counts(dtype: DType, memory: Memory, bias: bool, adjacent: bool):
    """Four GEMMs forward, eight backward, three of the data gradients with an epilogue; the fourth feeds attention. The
    gradients of q, k and v come from attention: rotating them back is the one leftover. Finalizes: two statistics
    forward; backward one row statistic (the other is the leftover's) and two gains, and one sum a GEMM with biases."""
    plan = planned(dtype, memory, bias, adjacent)
    assert counts(plan.forward) == {"gemm": 4, "finalize": 2, "leftover": 0, "prepare": 0}
    assert plan.forward.epilogues == 4
    assert counts(plan.backward) == {"gemm": 8, "finalize": 3 + 4 * bias, "leftover": 1, "prepare": 0}
    assert plan.backward.epilogues == 3
    assert sum(s.is_weight_gradient for s in plan.backward.steps) == 4
    (leftover,) = (s for s in plan.backward.steps if s.kind == "leftover")
    assert {"d_q", "d_k", "d_v"} <= set(leftover.loads)
    assert leftover.reason.startswith("no GEMM here produces d_k, d_q, d_v")


def test_float16_keeps_its_row_scales_in_front_of_the_gemms():
    """The unscaled product could overflow: each norm then is a leftover between two GEMMs, and says so."""
    plan = planned(f16)
    assert counts(plan.forward) == {"gemm": 4, "finalize": 2, "leftover": 2, "prepare": 0}
    assert all("statistic" in s.reason for s in plan.forward.steps if s.kind == "leftover")


def test_inference_keeps_nothing():
    plan = plan_inference(llama_segment(bf16))
    assert counts(plan) == {"gemm": 4, "finalize": 2, "leftover": 0, "prepare": 0}
    assert [name for name, _ in plan.outputs] == ["x2", "q", "k", "v"]
    gate_up = next(s for s in plan.steps if s.b == ("wg", "wu"))
    assert len(gate_up.stores) == 1


@pytest.mark.parametrize("bias, adjacent", [(False, False), (True, True)])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype, tolerance", [(f64, 1e-12), (f32, 1e-5), (bf16, 0.02), (f16, 0.003)])
def test_values_and_gradients(dtype: DType, tolerance: float, memory: Memory, bias: bool, adjacent: bool):
    graph = llama_segment(dtype, bias=bias, adjacent=adjacent)
    wrt = trained(graph)
    drive.expect_training(graph, plan_training(graph, wrt, memory), wrt, 150, tolerance)


def test_the_program_of_gate_and_up_as_text():
    """Short enough to read: RMSNorm's scale and SwiGLU behind one GEMM of two stacked weights."""
    gate_up = next(s for s in planned(bf16).forward.steps if s.b == ("wg", "wu"))
    assert (gate_up.a, gate_up.loads, gate_up.stores) == ("saved1", ("saved2",), ("t", "saved3"))
    assert program_text(gate_up.program) == (
        '@epilogue(gemm="nt", k=24, dtype=bf16)\n'
        "def wg_wu(acc: Tile[72, f32], saved2: ColVec[f32]):\n"
        "    t1 = acc * saved2\n"
        "    t2, t3 = halves(t1)\n"
        "    return dict(t=to(silu(t2) * t3, bf16), saved3=to(t1, bf16))\n"
    )


# --- bytes, at the size of Llama-3-8B: one unit is one activation of the residual stream ------------------------------

LLAMA_8B = Sizes(d=4096, ffn=14_336, heads=32, kv_heads=8, inside=128)
TOKENS = 16_384
UNIT = TOKENS * LLAMA_8B.d * 2
PARTIAL = TOKENS * (LLAMA_8B.d // 128) * 4  # one float32 a row and tile
STATISTIC = TOKENS * 4
VECTOR = LLAMA_8B.d * 2


def large(memory: Memory) -> TrainingPlan:
    graph = llama_segment(bf16, LLAMA_8B)
    return plan_training(graph, trained(graph), memory)


@pytest.mark.parametrize("memory", MEMORY)
def test_forward_moves_what_a_hand_counts(memory: Memory):
    norm_behind_a_gemm = 3 * UNIT + VECTOR + PARTIAL  # the residual in and out, h out; the gain; the partial sums
    finalize = PARTIAL + STATISTIC
    gate_and_up = STATISTIC + 7 * UNIT + 7 * UNIT // 2
    tables = 2 * TOKENS * LLAMA_8B.inside * 2
    qkv = STATISTIC + tables + 3 * UNIT // 2
    cost = plan_cost(large(memory).forward, TOKENS)
    assert cost.bytes == 2 * norm_behind_a_gemm + 2 * finalize + gate_and_up + qkv
    assert cost.bytes <= 2.50e9
    d, ffn = LLAMA_8B.d, LLAMA_8B.ffn
    assert cost.flops == 2 * TOKENS * d * (d + 2 * ffn + ffn + 6144)
    assert (cost.weight_gradient_bytes, cost.prepare_bytes) == (0, 0)


def test_backward_moves_what_a_hand_counts():
    """Every load and store of the eight GEMMs' epilogues, the finalizes and the leftover, with y and h kept."""
    rotate_back = 3 * UNIT // 2 * 3 + 2 * TOKENS * LLAMA_8B.inside * 2 + STATISTIC + STATISTIC
    gain = TOKENS // 128 * LLAMA_8B.d * 4  # one float32 a column and tile
    qkv = 3 * UNIT + STATISTIC + VECTOR + gain
    down = 14 * UNIT + STATISTIC + PARTIAL * 14_336 // LLAMA_8B.d
    statistic = PARTIAL * 14_336 // LLAMA_8B.d + 2 * STATISTIC
    gate_and_up = 3 * UNIT + STATISTIC + VECTOR + gain
    gains = 2 * (gain + VECTOR)
    cost = plan_cost(large("fast").backward, TOKENS)
    assert cost.bytes == rotate_back + qkv + down + statistic + gate_and_up + gains + UNIT
    weights = 2 * (LLAMA_8B.d * (LLAMA_8B.d + 3 * LLAMA_8B.ffn + 6144))
    assert cost.weight_gradient_bytes == weights
    forward = plan_cost(large("fast").forward, TOKENS)
    assert cost.flops == 2 * forward.flops


@pytest.mark.parametrize("memory, units, most", [("fast", 25.5, 3.5e9), ("balanced", 29, 3.95e9), ("lean", 31, 4.25e9)])
def test_backward_within_its_bound_in_every_memory_mode(memory: Memory, units: float, most: float):
    """Making y again stores it once more, 3.5 units; making both h again, 2 more."""
    moved = plan_cost(large(memory).backward, TOKENS).bytes
    assert moved <= most
    assert moved / UNIT == pytest.approx(units, rel=0.01)


def test_per_boundary_fusion_moves_what_a_hand_counts():
    graph = llama_segment(bf16, LLAMA_8B)
    forward, backward = plan_boundary_fusion(graph, trained(graph), [name for name, _ in graph.outputs])
    assert (forward.epilogues, backward.epilogues) == (0, 0)
    assert plan_cost(forward, TOKENS).bytes / UNIT == pytest.approx(31.5, rel=0.02)
    assert plan_cost(backward, TOKENS).bytes / UNIT == pytest.approx(35.0, rel=0.01)
