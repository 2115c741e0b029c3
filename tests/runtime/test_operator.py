"""`codetta.op`: a hand-written epilogue as an operator, eager and compiled, against plain PyTorch under autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import codetta
from codetta import (
    ColVec,
    GroupVec,
    Scalar,
    Table,
    Tile,
    columns,
    halves,
    i64,
    join_halves,
    where,
)
from codetta.capture.backend import captured
from codetta.errors import ShapeError, TypeMismatch, UnsupportedError
from operators import block, plain_block, residual_rms_op, swiglu_op

BACKENDS = ("eager", "aot_eager", "codetta")


@codetta.epilogue
def scaled_rope(acc: Tile, cos: Table, sin: Table, scale: GroupVec, alpha: Scalar, offset: Scalar[i64]):
    a, b = halves(acc, groups=2)
    y = join_halves(a * cos - b * sin, b * cos + a * sin, groups=2)
    return dict(y=where(offset > 3, y * scale * alpha, acc))


rope_op = codetta.op(scaled_rope)


def leaves(*lead: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lead))
    shapes = [(*lead, 16), (24, 16), (*lead, 24), (24,), (32, 24)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def step(fn: Callable[..., Sequence[Tensor]], given: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients, each output weighted by other numbers."""
    outputs = list(fn(*given))
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, given, weights)]


def agree(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lead", [(7,), (2, 5), (1, 1), (1,)], ids=str)
def test_values_and_gradients(lead):
    agree(step(block, leaves(*lead)), step(plain_block, leaves(*lead)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_one_graph(backend):
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    for lead in ((2, 5), (3, 9)):  # the second makes the rows dynamic
        agree(step(compiled, leaves(*lead)), step(plain_block, leaves(*lead)))


def test_programs_next_to_each_other_fuse_in_the_backward():
    (graph,) = captured(block, *leaves(2, 5, dtype=torch.bfloat16))
    assert not graph.capture.opaque
    ((_, compiled),) = graph.compiled()
    forward = [s for s in compiled.forward.steps if s.kind == "gemm"]
    assert len(forward) == 2
    dgrads = [s for s in compiled.training.backward.steps if s.kind == "gemm" and not s.is_weight_gradient]
    first = dgrads[0].program  # behind the second program's data gradient stands the first one's backward
    assert {str(n.type.dtype) for n in first.params} >= {"bf16"}
    assert dgrads[0].has_epilogue
    assert len(first.outputs) >= 2
    assert (
        compiled.training.backward.count("leftover") == 1
    )  # the map behind the last GEMM: no GEMM brings its gradient


def test_a_program_next_to_the_compilers():
    def model(x: Tensor, w: Tensor, gain: Tensor, w2: Tensor, rstd: Tensor) -> Tensor:
        h = F.rms_norm(F.linear(x, w), (24,), gain, 1e-6)
        return swiglu_op(h, w2, rstd=rstd)

    def plain(x: Tensor, w: Tensor, gain: Tensor, w2: Tensor, rstd: Tensor) -> Tensor:
        gate, up = (F.rms_norm(x @ w.T, (24,), gain, 1e-6) @ w2.T * rstd.unsqueeze(-1)).chunk(2, -1)
        return F.silu(gate) * up

    x, w, _, gain, w2 = leaves(2, 5)
    given = [x, w, gain, w2, torch.randn(2, 5).double().requires_grad_()]
    compiled = torch.compile(model, backend="codetta", fullgraph=True)
    agree(step(lambda *a: [compiled(*a)], given), step(lambda *a: [plain(*a)], given))
    (graph,) = captured(model, *given)
    assert len(graph.keys) == 1
    ((_, segment),) = graph.compiled()
    dgrads = [s for s in segment.training.backward.steps if s.kind == "gemm" and not s.is_weight_gradient]
    assert dgrads[0].has_epilogue


@pytest.mark.parametrize("backend", [None, "codetta", "aot_eager"])
def test_every_kind_of_parameter(backend):
    x, w = (t.requires_grad_() for t in (torch.randn(3, 4, 6).double(), torch.randn(16, 6).double()))
    cos, sin = (torch.randn(1, 4, 4).double().requires_grad_() for _ in range(2))  # the same for the whole batch
    scale = torch.randn(3, 4, 2).double().requires_grad_()

    def ours(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> list[Tensor]:
        return [rope_op(x, w, cos=cos, sin=sin, scale=scale, alpha=0.7, offset=4)]

    def plain(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> list[Tensor]:
        a, b = (x @ w.T).unflatten(-1, (2, 8)).chunk(2, -1)
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        y = torch.cat([a * c - b * s, b * c + a * s], -1) * scale.unsqueeze(-1) * torch.tensor(0.7).double()
        return [y.flatten(-2)]

    given = [x, w, cos, sin, scale]
    compiled = ours if backend is None else torch.compile(ours, backend=backend, fullgraph=True)
    agree(step(compiled, given), step(plain, given), 1e-6)  # 0.7 is a float32


@pytest.mark.parametrize("backend", [None, "codetta", "aot_eager"])
def test_autocast_narrows_the_operands(backend):
    compiled = block if backend is None else torch.compile(block, backend=backend, fullgraph=True)
    given = leaves(2, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream, y = compiled(*given)
    assert (stream.dtype, y.dtype) == (torch.float32, torch.bfloat16)  # the residual stream is float32 and stays so
    grads = torch.autograd.grad([stream.sum(), y.float().sum()], given)
    assert [g.dtype for g in grads] == [torch.float32] * 5
    exact = leaves(2, 5)
    with torch.no_grad():
        for a, b in zip(exact, given, strict=True):
            a.copy_(b)
    want = plain_block(*exact)
    wanted = torch.autograd.grad([want[0].sum(), want[1].sum()], exact)
    for a, b in zip([stream, y, *grads], [*want, *wanted], strict=True):
        assert float((a.detach().double() - b.detach()).norm() / b.detach().norm()) < 2e-2


def test_tiles_come_in_the_operands_dtype_and_statistics_in_float32():
    found = residual_rms_op(*leaves(6, dtype=torch.bfloat16)[:2], **named(torch.bfloat16))
    assert [found[n].dtype for n in ("x", "h", "ssq")] == [torch.bfloat16, torch.bfloat16, torch.float32]
    found = residual_rms_op(*leaves(6, dtype=torch.bfloat16)[:2], **named(torch.float32))
    assert [found[n].dtype for n in ("x", "h", "ssq")] == [torch.float32] * 3


def named(dtype: torch.dtype) -> dict[str, Tensor]:
    _, _, residual, gain, _ = leaves(6, dtype=dtype)
    return dict(residual=residual, gain=gain)


def test_frozen_weights_checkpointing_and_no_grad():
    given = leaves(2, 5)
    given[1].requires_grad_(False)
    plain = leaves(2, 5)
    wrt, theirs = [given[i] for i in (0, 2, 3, 4)], [plain[i] for i in (0, 2, 3, 4)]
    found = checkpoint(block, *given, use_reentrant=False)
    want = plain_block(*plain)
    agree(torch.autograd.grad([t.sum() for t in found], wrt), torch.autograd.grad([t.sum() for t in want], theirs))
    with torch.no_grad():
        assert not block(*given)[0].requires_grad


def test_no_rows():
    stream, y = block(*leaves(0, 5))
    assert (stream.shape, y.shape) == ((0, 5, 24), (0, 5, 16))


def test_a_form_of_its_own():
    @codetta.epilogue(gemm="nn", k=16, dtype=codetta.bf16)
    def doubled(acc: Tile):
        return acc * 2.0

    x, w = torch.randn(5, 16).double(), torch.randn(16, 8).double()
    agree([codetta.op(doubled)(x, w)], [2 * x @ w])


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(gain=None), ShapeError, r"missing \['gain'\], unknown \[\]"),
        (dict(bias=torch.ones(24)), ShapeError, r"unknown \['bias'\]"),
        (dict(gain=torch.ones(23)), ShapeError, "gain"),
        (dict(gain=torch.ones(24, dtype=torch.int64)), TypeMismatch, "gain is RowVec"),
        (dict(residual=torch.ones(5, 24)), ShapeError, "residual is Tile.* beside an x with"),
    ],
)
def test_parameters_that_do_not_fit(change, error, message):
    x, w, residual, gain, _ = leaves(6, dtype=torch.float32)
    params = {k: v for k, v in {**dict(residual=residual, gain=gain), **change}.items() if v is not None}
    with pytest.raises(error, match=message):
        residual_rms_op(x, w, **params)


def test_what_is_no_operator():
    @codetta.finalize
    def fold(s: ColVec):
        return s * 2.0

    @codetta.epilogue(gemm="tn", k="M", dtype=codetta.bf16)
    def wgrad(acc: Tile[8, 8]):
        return acc

    with pytest.raises(UnsupportedError, match="not a finalize"):
        codetta.op(fold)
    with pytest.raises(UnsupportedError, match="weight gradient"):
        codetta.op(wgrad)
    with pytest.raises(UnsupportedError, match="not 3"):
        codetta.op(3)
    with pytest.raises(UnsupportedError, match="no operator"):
        torch.ops.codetta.program(torch.ones(2, 2), torch.ones(2, 2), [], "0" * 32)


def test_ranges_of_columns_and_second_derivatives():
    @codetta.epilogue
    def parts(acc: Tile[12]):
        a, b = columns(acc, 8, 4)
        return dict(a=a * a, b=b)

    x, w = torch.randn(5, 6).double().requires_grad_(), torch.randn(12, 6).double().requires_grad_()
    found = codetta.op(parts)(x, w)
    agree([found["a"], found["b"]], [(x @ w.T)[:, :8].square(), (x @ w.T)[:, 8:]])
    (first,) = torch.autograd.grad(found["a"].sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        first.sum().backward()
