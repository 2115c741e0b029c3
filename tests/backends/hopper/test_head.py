"""The LM head through the kernels' executor, on the stand-in: reductions alone behind a GEMM, columns that a vector
names, logits turned into their gradient in place, slabs in lent memory."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from codetta.audit.tuning import plans_of
from codetta.backends.hopper.choose import is_tuned, lowered_of, own_kernel, why_split
from codetta.backends.hopper.tune import cases_of
from codetta.core.types import bf16, f16
from codetta.nn import head_gemms, head_run, slabs
from codetta.nn.head_graphs import (
    LARGEST,
    LOWER,
    LSE,
    TARGET,
    TOTAL,
    UPPER,
    Head,
    gradient_plan,
    statistics_plan,
    weight_plan,
)
from codetta.nn.head_run import Call, Wanted, What
from codetta.testing import relative_error

needs_quack = pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")
HEADS = [
    Head(64, bf16),
    Head(64, bf16, bf16),
    Head(64, f16, None, 0.5, 30.0),
    Head(64, bf16, bf16, 0.25),
    Head(64, bf16, f16, 1.0, 15.0),
]
WANTED = [(LSE, TARGET), (LSE, TARGET, TOTAL), (LSE, TARGET, LARGEST, UPPER, LOWER)]
COLUMNS = 1024


def plans(head: Head):
    """Every plan of a head."""
    for wanted in WANTED:
        for stored in (False, True):
            yield statistics_plan(head, COLUMNS, wanted, stored)
    for given in WANTED[:2]:
        for outputs in (("logits",), ("bias",), ("bias", "logits")):
            yield gradient_plan(head, COLUMNS, given, outputs, False)


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_every_gemm_is_one_kernel(head):
    """Statistics without a store, and gradients with the target's column inside the epilogue."""
    for plan in plans(head):
        assert plan.count("gemm") == 1
        assert plan.count("leftover") == 0
        assert [why_split(s.program) for s in plan.steps if s.kind == "gemm"] == [None]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_gradient_of_stored_logits_is_one_pass(head):
    """Nothing is reduced again: the log-sum-exp is known."""
    plan = gradient_plan(head, COLUMNS, (LSE, TARGET, TOTAL), ("logits",), True)
    assert [s.kind for s in plan.steps] == ["leftover"]
    assert not [n for n in plan.steps[0].program.body if n.op.family == "reduce"]


@pytest.mark.parametrize("features", [2048, 4096, 8192])
def test_what_is_tuned_for_a_loss_head(features):
    """One kernel each: statistics with and without a store, where logits are computed again their gradient, the
    weight's gradient, and from exponentials the input's."""
    cases = cases_of(plans_of(f"loss:{features}x128256", "bf16"), [8192])
    kinds = {(c.program.gemm.form, bool(c.lowered.stores), len(c.lowered.sinks)) for c in cases}
    assert kinds == {("nt", True, 2), ("tn", True, 0), ("nt", False, 2), ("nt", True, 0), ("nn", True, 0)}
    assert all((c.key.k if c.program.gemm.form == "nt" else c.key.n) == features for c in cases)


def test_a_column_named_by_a_vector_is_a_hit():
    """One operand, compared as an integer; nothing is rounded to a float."""
    plan = gradient_plan(HEADS[0], COLUMNS, (LSE, TARGET), ("logits",), False)
    lowered = lowered_of(plan.steps[0].program)
    assert [o.kind for o in lowered.operands].count("hit") == 1
    assert "_hit" in lowered.source


@needs_quack
def test_kernels_of_the_head_compile_without_spills():
    """For SM90, without a GPU; the metrics' program too, whose sinks are many."""
    from codetta.backends.hopper.binary import resources  # QuACK takes seconds to import
    from codetta.backends.hopper.build import compile_all, jobs_of, object_file

    bare, capped = HEADS[0], HEADS[2]
    found = [statistics_plan(bare, COLUMNS, WANTED[i], stored) for i, stored in ((0, False), (0, True), (2, False))]
    found += [gradient_plan(head, COLUMNS, (LSE, TARGET), ("logits",), False) for head in (bare, capped)]
    jobs = jobs_of(found)
    assert len(jobs) == len(found)
    compile_all(jobs)
    for job, name in jobs.items():
        assert not resources(object_file(job)).spill_stores, (name, job.config)


@pytest.fixture
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):  # what numpy warns of, a GPU computes silently
        yield


@needs_quack
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [6, 24, 40])
@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("columns", [264, 1001])
def test_gradients_through_the_executor(mode, tokens, columns, bias, monkeypatch):
    """Forward and backward by kernels (their stand-in), where every byte that is not written is NaN: lent and own
    logits, in place and not."""
    import standin

    standin.stand_in(monkeypatch)
    monkeypatch.setattr(Call, "backend", "hopper")
    monkeypatch.setattr(slabs, "LEAN_SLAB", 1)
    monkeypatch.setattr(slabs, "OF_GRADIENT", 1 << 30)
    monkeypatch.setattr(slabs, "SLAB_GRAIN", 64)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 32, generator=generator).bfloat16()
    w = (torch.randn(columns, 32, generator=generator) / 6).bfloat16()  # logits of about one
    b = [torch.randn(columns, generator=generator).bfloat16()] if bias else []
    index = torch.randint(-1, columns, (tokens,), generator=generator, dtype=torch.int32)
    wide = [t.double().requires_grad_() for t in (x, w, *b)]
    logits = torch.nn.functional.linear(*wide)
    picked = torch.where(index < 0, 0.0, logits.gather(1, index.clamp(min=0).long()[:, None])[:, 0])
    grads = {LSE: torch.rand(tokens, generator=generator), TARGET: -torch.rand(tokens, generator=generator)}
    exact = torch.autograd.grad((logits.logsumexp(1) * grads[LSE] + picked * grads[TARGET]).sum(), wide)
    for lends, given_up in ((False, False), (False, True), (True, False), (True, True)):
        call = Call(What(1.0, None, mode, lends), x, w, index, *b)
        (lse, target), held = head_run.forward(call, (LSE, TARGET))
        most = 1e-6 if not held else 2**-8  # kept logits are rounded, and statistics are of what is kept
        assert relative_error(lse, logits.logsumexp(1).detach()) < most
        assert relative_error(target, picked.detach()) < most
        before = [t.clone() for t in held]
        found = head_run.backward(call, lse, held, grads, Wanted(True, True, bias), given_up)
        same = [torch.equal(t.view(torch.int16), c.view(torch.int16)) for t, c in zip(held, before, strict=True)]
        assert given_up or all(same)
        for got, want in zip([g for g in found if g is not None], exact, strict=True):
            assert relative_error(got, want) < 5e-3
        if lends and given_up:
            assert found[1].untyped_storage().data_ptr() == held[-1].untyped_storage().data_ptr()


@needs_quack
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("tokens", [24, 33])
def test_the_weights_gradient_by_a_kernel_of_ours(tokens, monkeypatch):
    """Where a table has one for its sizes: into the memory that it is given, a number of tokens that 8 does not divide
    too."""
    import standin

    standin.stand_in(monkeypatch)
    for name in ("is_tuned", "own_kernel"):
        monkeypatch.setattr(head_gemms, name, lambda *_: True)
    monkeypatch.setattr("codetta.backends.hopper.steps.own_kernel", lambda *_: True)
    head_gemms._own_weight_gradient.cache_clear()
    generator = torch.Generator().manual_seed(tokens)
    gradient, x = (torch.randn(tokens, n, generator=generator).bfloat16() for n in (264, 64))
    out = torch.full((300, 64), torch.nan).bfloat16()[20:284]
    head_gemms.weight_gradient("hopper", gradient, x, out)
    head_gemms._own_weight_gradient.cache_clear()
    assert relative_error(out, gradient.double().t() @ x.double()) < 3e-3


def test_no_kernel_of_ours_where_only_a_neighbour_was_measured():
    """A slab's weight gradient is the library's, also where the table would give its neighbour's."""
    whole, slab = (weight_plan(bf16, columns, 4096).steps[0].program for columns in (128_256, 64_128))
    assert (is_tuned(whole, 8192), own_kernel(whole, 8192)) == (True, True)
    assert (is_tuned(slab, 8192), own_kernel(slab, 8192)) == (False, True)
    assert not is_tuned(weight_plan(bf16, 1001, 4096).steps[0].program, 8192)
