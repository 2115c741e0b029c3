"""Epilogues of every kind as one kernel each, against plain PyTorch in float64, at tokens of no tile."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from codetta.backends.hopper.choose import why_split
from codetta.backends.reference.evaluate import TORCH
from codetta.core.node import substitute
from codetta.core.types import bf16, tile
from codetta.ir.build import input_, matmul
from codetta.ir.graph import Graph
from codetta.ir.program import param_name
from codetta.partition.plan import Plan
from codetta.partition.training import plan_training
from codetta.testing import relative_error
from epilogues import CASES, inputs
from target import DEVICE, executable, here

K = 64
TOKENS = (1, 7, 127, 4097)
# One rounding to 16 bits; float32 with the hardware's exp and reciprocal, and the accumulator's own rounding.
LIMITS = {torch.bfloat16: 0.5 * 2**-8, torch.float32: 3e-4}


@cache
def plan_of(name: str) -> Plan:
    """The program behind its GEMM, with a step that folds each of its partials."""
    program, _ = CASES[name]
    acc, *params = program.params
    form, cols = program.gemm.form, acc.type.cols
    x, w = input_("left", tile(K, bf16)), input_("right", tile(*((K, bf16, cols) if form == "nt" else (cols, bf16, K))))
    bodies = substitute([n for _, n in program.outputs], {acc: matmul(x, w, form)})
    names = [name for name, _ in program.outputs]
    graph = Graph((x, w, *params), tuple(zip(names, bodies, strict=True)))
    return plan_training(graph, [], as_written=True).forward


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_kernel(name):
    gemms = [s.program for s in plan_of(name).steps if s.kind == "gemm"]
    assert [why_split(p) for p in gemms] == [None]
    assert not [s for s in plan_of(name).steps if s.kind == "leftover"]


@pytest.mark.parametrize("rows", TOKENS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name, rows):
    program, expected = CASES[name]
    acc, *values = inputs(program, rows, rows)
    values = [v.to(TORCH[n.type.dtype]) for n, v in zip(program.params[1:], values, strict=True)]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, K, generator=generator).bfloat16()
    w = torch.randn(acc.shape[1], K, generator=generator).mul(K**-0.5).bfloat16()
    exact = x.double() @ w.double().t()
    wanted = expected(exact, *(v.double() if v.is_floating_point() else v for v in values))
    stored = w if program.gemm.form == "nt" else w.t().contiguous()
    feed = {"left": x, "right": stored, **{param_name(n): v for n, v in zip(program.params[1:], values, strict=True)}}
    plan = plan_of(name)
    found = executable(plan).run({n: here(feed[n]) for n in plan.inputs}, rows)
    for (output, _), want in zip(program.outputs, wanted, strict=True):
        got = found[dict(plan.outputs)[output].buffer]
        assert got.device.type == DEVICE
        assert tuple(got.shape) == tuple(want.shape)
        assert relative_error(got.cpu(), want) <= LIMITS[got.dtype], output
