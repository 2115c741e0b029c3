"""Every program of Llama models compiles for SM90 on a machine without a GPU, and no default configuration spills; one
that was measured to be the fastest may spill a few registers.

A sample runs in CI; `make spills` runs all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest
from plans import DTYPES, MODELS, REGIMES, plans

from codetta.backends.hopper.choose import is_bare, why_split
from codetta.backends.hopper.config import BUCKETS
from codetta.backends.hopper.space import candidates
from codetta.backends.hopper.tune import SLIGHT
from epilogues import CASES

needs_quack = pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")
SAMPLE = {("llama3-8b", "bf16", "whole"), ("llama3-1b", "bf16", "block"), ("llama3-70b", "f16", "whole")}
ALL = [(m, d, r) for m in MODELS for d in DTYPES for r in REGIMES]
MODEL_CASES = ALL if os.environ.get("CODETTA_SPILLS") == "all" else sorted(SAMPLE)
REGISTERS = 168  # what 384 threads can have of an SM's 65,536


def _resources(jobs: Mapping[Any, str]) -> dict[str, Any]:
    from codetta.backends.hopper.binary import resources
    from codetta.backends.hopper.build import object_file

    return {f"{name} {job.config}": resources(object_file(job)) for job, name in jobs.items()}


@needs_quack
@pytest.mark.parametrize("model,dtype,regime", MODEL_CASES)
def test_no_default_configuration_spills(model, dtype, regime):
    from codetta.backends.hopper.build import compile_all, jobs_of  # QuACK takes seconds to import

    jobs = {job: name for rows in BUCKETS for job, name in jobs_of(plans(model, dtype, regime), rows=rows).items()}
    compile_all(jobs)
    measured = {job: name for job, name in jobs.items() if job.config not in candidates(job.lowered)}
    known, found = _resources({job: name for job, name in jobs.items() if job not in measured}), _resources(measured)
    assert not {name: r for name, r in known.items() if r.spills}
    assert not {name: r for name, r in found.items() if r.spill_stores > SLIGHT}
    assert all(0 < r.registers <= REGISTERS for r in (known | found).values())


@needs_quack
def test_no_kind_of_epilogue_spills():
    from codetta.backends.hopper.build import compile_all
    from codetta.backends.hopper.gemm import job_of

    jobs = {job_of(program): name for name, (program, _) in CASES.items()}
    compile_all(jobs)
    assert not {name: r for name, r in _resources(jobs).items() if r.spills}


@pytest.mark.parametrize("model,dtype,regime", ALL)
def test_every_epilogue_is_one_kernel(model, dtype, regime):
    programs = [s.program for plan in plans(model, dtype, regime) for s in plan.steps if s.kind == "gemm"]
    fused = [p for p in programs if not is_bare(p)]
    assert len(fused) >= 5
    assert not {p.name: why_split(p) for p in fused if why_split(p)}
