"""Gradients written over the saved values that they are computed from: the same bits as in memory of their own."""

from __future__ import annotations

import pytest
import torch

import mirror
from codetta.core.types import bf16
from codetta.partition.cut import MEMORY, Memory
from codetta.partition.lifetime import overwritten, private
from codetta.partition.training import plan_training
from gpu.test_programs import cotangents_of, feed_of
from graphs import Sizes, llama_segment, trained
from target import STANDIN, executable

SIZES = {
    "small": Sizes(d=256, ffn=704, heads=2, kv_heads=1, inside=128),
    "1B": Sizes(d=2048, ffn=8192, heads=32, kv_heads=8, inside=64),
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("size, rows", [("small", 1), ("small", 127), ("small", 4097), ("1B", 2048)])
def test_the_same_bits(size: str, rows: int, memory: Memory):
    if STANDIN and size == "1B":
        pytest.skip("the stand-in is a CPU")
    graph = llama_segment(bf16, SIZES[size])
    plan = plan_training(graph, trained(graph), memory)
    feed = feed_of(graph, rows)
    found = executable(plan.forward).run({n: feed[n] for n in plan.forward.inputs}, rows)
    views = dict(plan.forward.outputs)
    kept = {name: found[views[output].buffer] for name, output in plan.saved}
    held = {n: t for n, t in {**feed, **kept, **cotangents_of(graph, rows)}.items() if n in plan.backward.inputs}
    before = {n: t.clone() for n, t in held.items()}
    backward = executable(plan.backward)
    first = backward.run(held, rows)
    assert all(torch.equal(t, before[n]) for n, t in held.items())
    last = backward.run(held, rows, private(plan))
    assert [n for n, t in last.items() if not torch.equal(t, first[n])] == []
    changed = {n for n, t in held.items() if not torch.equal(t, before[n])}
    over = {load for step in overwritten(plan.backward, private(plan)) for load in step.values()}
    assert changed == (set() if STANDIN else over & private(plan))
    assert mirror.name(graph.inputs[0]) not in changed
