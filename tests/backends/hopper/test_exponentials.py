"""A head that holds exponentials, through the kernels' executor on the stand-in: its Triton kernels in the interpreter
against those in PyTorch, and forward and backward against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import interpreted
from codetta.backends.base import FAR, LEAST, MOST, HeadTensors
from codetta.backends.hopper import exponentials as kernels
from codetta.backends.hopper.binary import resources
from codetta.backends.reference import exponentials as plain
from codetta.core.types import bf16
from codetta.nn import exponentials
from codetta.nn.head_graphs import LSE, TARGET, Head, exponentials_plan, from_exponentials_plan
from codetta.nn.head_run import Call, Wanted, What
from codetta.nn.slabs import EXPONENTIALS
from codetta.testing import relative_error

needs_quack = pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    interpreted.as_a_gpu(monkeypatch)
    with np.errstate(all="ignore"):  # what numpy warns of, a GPU computes silently
        yield


def rows(tokens: int, columns: int, features: int, seed: int) -> list[torch.Tensor]:
    """x, weight and targets, a third of them none; the first rows' logits are large."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, features, generator=generator) for n in (tokens, columns))
    x[:4] *= 40.0
    index = torch.randint(columns, (tokens,), generator=generator, dtype=torch.int32)
    index[2::3] = -1
    return [x.bfloat16(), weight.bfloat16(), index]


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("columns, features", [(264, 32), (64, 1032), (2200, 72)])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_kernels_are_what_pytorch_computes(columns, features, scale):
    """All that they give, of rows that overflow, too, rows without a target, and whichever gradients."""
    x, weight, index = rows(9, columns, features, columns)
    head = HeadTensors(x, weight, index, scale)
    near = plain.reference(head)
    torch.testing.assert_close(kernels.reference(head), near, rtol=1e-5, atol=1e-4)
    assert (near[2::3] == FAR).all()
    z = (x.float() @ weight.float().t()) * scale - near[:, None]
    e, lse = z.exp().bfloat16(), z.exp().sum(1).log()
    target = torch.where(index < 0, 0.0, z.gather(1, index.clamp(min=0).long()[:, None])[:, 0])
    assert int((lse > MOST).sum()) in range(1, 9)
    found, want = (rows_.settle(head, lse.clone(), target, near, e.clone()) for rows_ in (kernels, plain))
    for a, b in zip((*found[:2], *found[2][1:]), (*want[:2], *want[2][1:]), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    ours, theirs = found[2], want[2]
    torch.testing.assert_close(ours.matrix, theirs.matrix, rtol=1e-2, atol=1e-30)
    generator = torch.Generator().manual_seed(1)
    d_lse, d_target = torch.rand(9, generator=generator), -torch.rand(9, generator=generator)
    d_lse[1], d_target[1], d_lse[3] = 0.0, 0.0, 0.0
    for into in (torch.full_like(x, torch.nan), None):
        also = None if into is None else into.clone()
        factor = kernels.scale_rows(head, ours, d_lse, d_target, into)
        torch.testing.assert_close(factor, plain.scale_rows(head, theirs, d_lse, d_target, also), rtol=5e-5, atol=0.0)
        torch.testing.assert_close(ours.matrix, theirs.matrix, rtol=1e-2, atol=1e-30)
        if into is not None:
            torch.testing.assert_close(into, also, rtol=1e-2, atol=0.0)


TENSORS = {
    **dict.fromkeys(("x", "weight", "held", "scaled"), "*bf16"),
    **dict.fromkeys(("rows", "columns", "features"), "i32"),
    "index": "*i32",
    "scale": "fp32",
}
CONSTANTS = {"FAR": FAR, "MOST": MOST, "LEAST": LEAST, "PARTS": kernels.PARTS, "SCALED": True, "BLOCK": kernels.BLOCK}


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_kernels_compile_for_hopper(name, tmp_path):
    """Without spills; those that read x in loads of 16 bytes, those that are GEMMs on tensor cores."""
    kernel = kernels.kernel(name, False)
    tile = kernels.TILE if "COLUMNS" in kernel.arg_names else {"ROWS": kernels.SETTLED}
    constants = {n: v for n, v in (CONSTANTS | tile).items() if n in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else TENSORS.get(n, "*fp32") for n in kernel.arg_names}
    aligned = [t[0] == "*" or n in ("columns", "features") for n, t in signature.items()]
    attrs = {(i,): [["tt.divisibility", 16]] for i, ok in enumerate(aligned) if ok}
    source = ASTSource(kernel, signature, constants, attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels.OPTIONS)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    assert not resources(file).spills
    assert ("wgmma" in made.asm["ptx"]) == (name in ("measure_rows", "rewrite_rows"))
    if name in ("near_target", "scale_row"):
        assert "ld.global.v4.b32" in made.asm["ptx"]


@needs_quack
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("tokens", [6, 24, 33])
@pytest.mark.parametrize("wanted", [Wanted(True, True, False), Wanted(True, False, False), Wanted(False, True, False)])
def test_gradients_through_the_executor(tokens, wanted, monkeypatch):
    """The program and its finalize, the three kernels and the two GEMMs behind, where every byte that is not written
    is NaN; twice, with other gradients."""
    import standin

    standin.stand_in(monkeypatch)
    monkeypatch.setattr(Call, "backend", "hopper")
    x, weight, index = rows(tokens, 264, 32, tokens)
    call = Call(What(0.5, None, EXPONENTIALS, False), x, weight, index)
    (lse, target), held = exponentials.forward(call)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    logits = 0.5 * torch.nn.functional.linear(*wide)
    has = index >= 0
    picked = torch.where(has, logits.gather(1, index.clamp(min=0).long()[:, None])[:, 0], 0.0)
    whole = torch.where(has, logits.logsumexp(1), 0.0)
    assert relative_error(lse, whole.detach()) < 1e-6
    assert relative_error(target, picked.detach()) < 1e-6
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        grads = {LSE: torch.rand(tokens, generator=generator) * has}
        grads[TARGET] = -torch.rand(tokens, generator=generator) * has
        exact = torch.autograd.grad((whole * grads[LSE] + picked * grads[TARGET]).sum(), wide, retain_graph=True)
        found = exponentials.backward(call, held, grads, wanted)
        assert [t is not None for t in found] == [wanted.x, wanted.weight, False]
        for got, want in zip(found[:2], exact, strict=True):
            assert got is None or relative_error(got, want) < 5e-3


@needs_quack
@pytest.mark.parametrize("features", [64, 2048, 8192])
def test_no_spills(features):
    """Of the head's program and of the input's gradient."""
    from codetta.backends.hopper.build import compile_all, jobs_of, object_file  # QuACK takes seconds to import

    head = Head(features, bf16)
    plans = [exponentials_plan(head, 1024), from_exponentials_plan(head, 1024, ("x",))]
    assert [p.count("gemm") for p in plans] == [1, 1]
    assert [p.count("leftover") for p in plans] == [0, 0]
    jobs = jobs_of(plans)
    compile_all(jobs)
    for job, name in jobs.items():
        assert not resources(object_file(job)).spills, (name, job.config)
