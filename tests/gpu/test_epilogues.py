"""Epilogues of every kind as one kernel each, against plain PyTorch in float64, at tokens of no tile."""

from __future__ import annotations

import pytest
import torch

from codetta.backends.hopper.choose import why_split
from codetta.testing import relative_error
from epilogues import CASES, case, plan_of
from target import DEVICE, executable, here

TOKENS = (1, 7, 127, 4097)
# One rounding to 16 bits; float32 with the hardware's exp and reciprocal, and the accumulator's own rounding.
LIMITS = {torch.bfloat16: 0.5 * 2**-8, torch.float32: 3e-4}


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_kernel(name):
    gemms = [s.program for s in plan_of(name).steps if s.kind == "gemm"]
    assert [why_split(p) for p in gemms] == [None]
    assert not [s for s in plan_of(name).steps if s.kind == "leftover"]


@pytest.mark.parametrize("rows", TOKENS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name, rows):
    program, _ = CASES[name]
    plan, feed, wanted = plan_of(name), *case(name, rows)
    found = executable(plan).run({n: here(feed[n]) for n in plan.inputs}, rows)
    for (output, _), want in zip(program.outputs, wanted, strict=True):
        got = found[dict(plan.outputs)[output].buffer]
        assert got.device.type == DEVICE
        assert tuple(got.shape) == tuple(want.shape)
        assert relative_error(got.cpu(), want) <= LIMITS[got.dtype], output
