"""C31, without a GPU: with ``batch_invariant`` no kernel of a model is chosen by the number of rows, and what is left
to the library is told."""

import logging

import pytest
import torch

from codetta.audit.explain import explain, split_programs
from codetta.audit.families import subject
from codetta.backends.hopper.steps import kernels_of

ROWS = (1, 3, 65, 4097)


@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "qwen3", "gpt2"))]
)
def test_kernels_of_any_number_of_rows(name, caplog):
    torch._dynamo.reset()
    found = subject(name, torch.bfloat16, tiny=False)
    # the logits stay whole: the loss head has a batch of its own size
    plans = list(explain(found.model, found.batch, options={"logits": "always"}).plans.values())
    steps = [s for pair in plans for plan in pair for s in plan.steps if s.kind == "gemm"]
    rows_are_tokens = [s for s in steps if not s.is_weight_gradient]
    caplog.set_level(logging.WARNING, logger="codetta")

    def jobs(invariant: bool) -> list[list[object]]:
        return [[kernels_of(s, n, invariant, lambda step: None).job for n in ROWS] for s in rows_are_tokens]

    pinned, free = jobs(True), jobs(False)
    assert all(len(set(of_step)) == 1 for of_step in pinned)
    assert any(len(set(of_step)) > 1 for of_step in free)
    told = {record.args[0] for record in caplog.records if "not batch invariant" in record.msg}
    left = {s.program.name for s, of_step in zip(rows_are_tokens, pinned, strict=True) if of_step[0] is None}
    split = {n for names in split_programs(plans).values() for n in names} - {
        s.program.name for s in steps if s.is_weight_gradient
    }
    assert told == left == split
    assert left == {"llama": set(), "qwen3": set(), "gemma2": {"q_proj_k_proj_v_proj"}}.get(name, left)
