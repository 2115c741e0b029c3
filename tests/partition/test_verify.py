"""The verifier of plans: a plan that holds, and the same plan with one thing wrong at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from codetta.core.types import bf16, f32
from codetta.errors import PlanError
from codetta.partition import build, training
from codetta.partition.plan import Plan, Step, View
from codetta.partition.training import plan_training
from codetta.partition.verify import verify_passage, verify_plan
from graphs import llama_segment, trained

GRAPH = llama_segment(bf16, bias=True)
TRAINING = plan_training(GRAPH, trained(GRAPH), "balanced")
FORWARD, BACKWARD = TRAINING.forward, TRAINING.backward
GIVEN = {f"d_{name}": n.type for name, n in GRAPH.outputs}
PARTIAL = next(b for b in FORWARD.steps[0].stores if b in FORWARD.partials)


def with_step(plan: Plan, index: int, change: Callable[[Step], Step]) -> Plan:
    steps = list(plan.steps)
    steps[index] = change(steps[index])
    return replace(plan, steps=tuple(steps))


def with_output(plan: Plan, name: str, view: View) -> Plan:
    return replace(plan, outputs=tuple((n, view if n == name else v) for n, v in plan.outputs))


def swapped(plan: Plan) -> Plan:
    first, second, *rest = plan.steps
    return replace(plan, steps=(second, first, *rest))


def renamed(s: Step) -> Step:
    return replace(s, program=replace(s.program, name="another"))


def narrow(s: Step) -> Step:
    gemm = s.program.gemm
    assert gemm is not None
    return replace(s, program=replace(s.program, gemm=replace(gemm, k=7)))


def test_plans_that_hold():
    verify_plan(FORWARD)
    verify_plan(BACKWARD)
    verify_passage(FORWARD, BACKWARD, TRAINING.saved, GIVEN)
    verify_plan(Plan((), (), (), {}))


@pytest.mark.parametrize(
    "plan, problem",
    [
        (swapped(FORWARD), f"reads {PARTIAL} before it is written"),
        (replace(FORWARD, steps=(FORWARD.steps[0], renamed(FORWARD.steps[0]))), "another: writes .* again"),
        (replace(FORWARD, steps=(*FORWARD.steps, FORWARD.steps[0])), "steps share names"),
        (replace(FORWARD, inputs=(*FORWARD.inputs, "x")), r"inputs share names: \['x'\]"),
        (replace(FORWARD, outputs=(*FORWARD.outputs, FORWARD.outputs[0])), "outputs share names"),
        (replace(FORWARD, inputs=FORWARD.inputs[1:]), "reads y before it is written"),
        (
            replace(FORWARD, buffers={**FORWARD.buffers, "x": FORWARD.buffers["x"].of(f32)}),
            r"is bound to x, a Tile\[M, 24, f32\]",
        ),
        (
            replace(FORWARD, buffers={**FORWARD.buffers, "x2": FORWARD.buffers["x2"].of(f32)}),
            r"is bound to x2, a Tile\[M, 24, f32\]",
        ),
        (with_step(FORWARD, 0, lambda s: replace(s, loads=s.loads[1:])), "buffers for . parameters"),
        (with_step(FORWARD, 0, lambda s: replace(s, stores=s.stores[1:])), "buffers for . outputs"),
        (with_step(FORWARD, 0, narrow), r"the GEMM of .* is no <input \['acc'"),
        (with_step(FORWARD, 0, lambda s: replace(s, b=("wg",))), "the GEMM of"),
        (with_step(FORWARD, 0, lambda s: replace(s, a=s.b[0], b=(s.a,))), "the GEMM of"),
        (replace(FORWARD, partials=frozenset()), f"writes {PARTIAL} in parts"),
        (replace(FORWARD, partials=FORWARD.partials | {"x2"}), "writes x2 whole"),
        (with_output(FORWARD, "x2", View(PARTIAL)), "the output x2 is in parts"),
        (with_output(FORWARD, "x2", View("x")), "no step writes the output x2"),
        (with_output(FORWARD, "x2", View("nothing")), "no step writes the output x2"),
        (with_output(BACKWARD, "d_wq", View(dict(BACKWARD.outputs)["d_wq"].buffer, (40, 400))), "d_wq is rows"),
        (with_output(FORWARD, "x2", View("x2", (0, 1))), r"the output x2 is rows \(0, 1\) of M"),
        (replace(FORWARD, outputs=FORWARD.outputs[1:]), r"nobody reads \['x2'\]"),
    ],
)
def test_what_does_not_hold(plan: Plan, problem: str):
    with pytest.raises(PlanError, match=problem):
        verify_plan(plan)


def test_a_partial_is_folded_by_finalizes_alone():
    index = next(i for i, s in enumerate(FORWARD.steps) if s.program.role == "finalize")
    as_leftover = with_step(FORWARD, index, lambda s: replace(s, program=replace(s.program, role="leftover")))
    with pytest.raises(PlanError, match=f"reads {PARTIAL}, which is in parts"):
        verify_plan(as_leftover)


@pytest.mark.parametrize(
    "saved, given, problem",
    [
        ((), GIVEN, "backward reads saved"),
        (tuple((name, "nothing") for name, _ in TRAINING.saved), GIVEN, "forward has no output nothing to keep"),
        (tuple((name, "q") for name, _ in TRAINING.saved), GIVEN, "which it is not given as it is"),
        (TRAINING.saved, {}, "backward reads d_"),
        (
            TRAINING.saved,
            {n: t.of(f32) for n, t in GIVEN.items()},
            "backward reads d_.*, which it is not given as it is",
        ),
    ],
)
def test_what_backward_is_not_given(saved, given, problem: str):
    with pytest.raises(PlanError, match=problem):
        verify_passage(FORWARD, BACKWARD, saved, given)


def test_it_runs_on_every_plan_while_tests_run(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise PlanError("looked at")

    for module, name in ((build, "verify_plan"), (training, "verify_passage"), (training, "verify_graph")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(PlanError, match="looked at"):
                plan_training(GRAPH, ["x"], "balanced")
            patch.setenv("CODETTA_VERIFY_IR", "0")
            plan_training(GRAPH, ["x"], "balanced")
