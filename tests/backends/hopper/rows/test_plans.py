"""Every step of a small model's plans as kernels, forward and backward: what the reference backend gives."""

import re

import pytest
import torch
from torch import Tensor

from codetta.audit import families
from codetta.audit.explain import explain
from codetta.audit.models import Request, find
from codetta.backends.hopper.rows import compile_rows
from codetta.backends.reference.evaluate import contract
from codetta.backends.reference.execute import Executable
from codetta.backends.reference.tiles import fold
from codetta.core.types import Kind
from codetta.partition.plan import Plan, Step, partial_outputs
from interpreted import expect_close, random_value, run

ROWS = 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}  # of the largest value; rounding may fall the other way


def plans(dtype: str) -> list[Plan]:
    subject = find(Request("llama-tiny", layers=2, tokens=16, batch=2, dtype=dtype), weights=False)
    found = explain(subject.model, subject.batch)
    return [plan for pair in found.plans.values() for plan in pair]


def check(executable: Executable, memory: dict[str, Tensor], i: int) -> None:
    """Run a step on both; the reference's stores go into memory."""
    step, body = executable.plan.steps[i], executable.bodies[i]
    program = step.program
    params, parts = [executable._load(memory, name) for name in step.loads], [memory[name] for name in step.loads]
    if program.gemm is not None:
        acc = contract(program.gemm.form, memory[step.a], [memory[w] for w in step.b])
        params, parts = [acc, *params], [acc, *parts]
    want = body(params, ROWS)
    memory.update(zip(step.stores, want, strict=True))
    got = run(program, parts, ROWS, partial(executable, step))
    for (name, n), w, in_parts in zip(program.outputs, want, partial_outputs(program), strict=True):
        whole = fold(n, w) if in_parts else w
        expect_close(f"{program.name}.{name}", got[name], whole, TOLERANCE[whole.dtype])


def partial(executable: Executable, step: Step) -> dict[str, object]:
    names = [str(p.attrs[0]) for p in step.program.params if p.op.name == "input"][-len(step.loads) :]
    pairs = zip(names, step.loads, strict=True) if step.loads else ()
    return {name: executable.reductions[b] for name, b in pairs if b in executable.reductions}


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_all_steps_of_a_model(dtype: str):
    kinds = set()
    rng = torch.Generator().manual_seed(0)
    for plan in plans(dtype):
        executable = Executable(plan)
        memory = {n: random_value(plan.buffers[n], ROWS, rng) for n in plan.inputs}
        memory |= {
            n: t.abs() + 0.5 for n, t in memory.items() if plan.buffers[n].kind is Kind.COLVEC and t.is_floating_point()
        }
        with torch.no_grad():
            for i, step in enumerate(plan.steps):
                check(executable, memory, i)
                kinds.add(step.kind)
    assert kinds >= {"gemm", "finalize", "leftover"}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3-moe"])
def test_a_group_is_summed_up_once(family: str):
    """Normed heads of queries and of keys, of other numbers, in one kernel: a block holds whole heads of either. One
    that does not sums the head up anew for each of its columns (seen on an H200: 15 ms instead of a few tenths)."""
    with torch.device("meta"):
        subject = families.subject(family, torch.bfloat16, tiny=False)
    grouped = 0
    for pair in explain(subject.model, subject.batch).plans.values():
        for executable in map(Executable, pair):
            for step in executable.plan.steps:
                if step.program.gemm is None:
                    kernel = compile_rows(step.program, partial(executable, step))
                    text = kernel.text
                    assert len(kernel.steps) == 1, step.program.name  # sums over rows too, a part a block
                    assert not re.search(r"^ +for i\d+ in range", text, re.MULTILINE), step.program.name
                    grouped += len(re.findall(r"^ +for g\d+ in range", text, re.MULTILINE))
    assert grouped
