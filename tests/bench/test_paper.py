"""The paper's ten programs: each is one kernel at the paper's shapes, and right against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from codetta.backends.hopper.choose import why_split
from codetta.bench import paper, peers
from codetta.bench.baselines import BARE
from codetta.bench.kernels import Settings
from codetta.bench.paper import PROGRAMS, bound
from codetta.bench.report import OURS, Report
from codetta.bench.shapes import PAPER, SHAPES
from codetta.core.types import i32
from codetta.ir.build import input_
from codetta.ir.program import param_name
from codetta.lang.sizes import on_leaves
from codetta.testing import relative_error

TINY = SHAPES["tiny"]


def test_there_are_ten():
    assert len({e.name for e in PROGRAMS}) == 10


@pytest.mark.skipif(find_spec("quack") is None, reason="the kernels' packages are not installed")
@pytest.mark.parametrize("shape", PAPER)
@pytest.mark.parametrize("entry", PROGRAMS, ids=lambda e: e.name)
def test_each_is_one_kernel(entry: paper.Entry, shape: str):
    assert why_split(bound(entry, SHAPES[shape])) is None


def test_each_is_right_and_timed():
    report = Report("paper")
    paper.paper([TINY], Settings(rounds=1, variants=("compile",)), report, "reference")
    ours = {r.case: r for r in report.rows if r.variant == OURS}
    assert ours.keys() == {e.name for e in PROGRAMS}
    assert all(r.median and r.base == BARE and r.error is not None and r.error < 4e-3 for r in ours.values())
    assert not [r.note for r in report.rows if r.note]


@pytest.mark.parametrize("name", ["GEMM + SwiGLU", "RMS + GEMM + SwiGLU"])
def test_a_peer_of_separate_modules_takes_a_stacked_weight_apart(name):
    """Liger's SwiGLU, of gate and up apart, is the program's own."""
    entry = next(e for e in PROGRAMS if e.name == name)
    case = paper.case(entry, TINY, paper.plan_of(bound(entry, TINY)), "cpu", "reference")
    liger = SimpleNamespace(liger_swiglu=lambda a, b: torch.nn.functional.silu(a) * b)
    found = peers.LIGER["SwiGLU"](case, liger, False)()
    acc = case.memory["a"].double() @ case.memory["w"].double().t()
    gate, up = (acc * case.roles["rstd"].double()[:, None] if "rstd" in case.roles else acc).chunk(2, 1)
    assert relative_error(found["y"], torch.nn.functional.silu(gate) * up) < 2e-2


def test_an_index_is_drawn_in_the_programs_own_dtype():
    """An answer of docs/authoring/experiment.md may take its targets as i32."""
    entry = next(e for e in PROGRAMS if e.name == "GEMM + cross-entropy")
    program = bound(entry, TINY)
    narrow = tuple(input_("target", p.type.of(i32)) if param_name(p) == "target" else p for p in program.params)
    changed = replace(program, params=narrow, outputs=on_leaves(program, narrow, {}))
    for form, dtype in ((program, torch.int64), (changed, torch.int32)):
        found = paper.case(entry, TINY, paper.plan_of(form), "cpu", "reference")
        assert found.roles["target"].dtype is dtype
