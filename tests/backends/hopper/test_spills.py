"""Every program of Llama models compiles for SM90 on a machine without a GPU, and no default configuration spills.

A sample runs in CI; `make spills` runs all."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from plans import DTYPES, MODELS, REGIMES, plans

from codetta.backends.hopper.choose import is_bare, why_split

needs_quack = pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")
SAMPLE = {("llama3-8b", "bf16", "whole"), ("llama3-1b", "bf16", "block"), ("llama3-70b", "f16", "whole")}
ALL = [(m, d, r) for m in MODELS for d in DTYPES for r in REGIMES]
CASES = ALL if os.environ.get("CODETTA_SPILLS") == "all" else sorted(SAMPLE)
REGISTERS = 168  # what 384 threads can have of an SM's 65,536


@needs_quack
@pytest.mark.parametrize("model,dtype,regime", CASES)
def test_no_default_configuration_spills(model, dtype, regime):
    from codetta.backends.hopper.binary import resources  # QuACK takes seconds to import
    from codetta.backends.hopper.build import compile_all, jobs_of, object_file

    jobs = jobs_of(plans(model, dtype, regime))
    compile_all(jobs)
    found = {name: resources(object_file(job)) for job, name in jobs.items()}
    assert not {name: r for name, r in found.items() if r.spills}
    assert all(0 < r.registers <= REGISTERS for r in found.values())


@pytest.mark.parametrize("model,dtype,regime", ALL)
def test_every_epilogue_is_one_kernel(model, dtype, regime):
    programs = [s.program for plan in plans(model, dtype, regime) for s in plan.steps if s.kind == "gemm"]
    fused = [p for p in programs if not is_bare(p)]
    assert len(fused) >= 5
    assert not {p.name: why_split(p) for p in fused if why_split(p)}
