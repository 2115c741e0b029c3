"""How kernels run: the same bits each time, in CUDA graphs, on side streams, on huge and on empty tensors, and on any
strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cases.modules import Deep
from codetta.capture.backend import recording
from codetta.core.types import bf16, colvec, f32, i32, rowvec, tile
from codetta.ir.build import add, cast, input_, logsumexp_row, matmul, select_column, sub
from codetta.ir.graph import Graph
from codetta.partition.plan import Plan
from codetta.partition.training import TrainingPlan, cotangent_name, plan_training
from codetta.testing import relative_error
from graphs import rms_norm
from target import DEVICE, executable, sized
from ways import compiled, counts, forward_plans, fresh, run

BF16 = torch.bfloat16
CLOSE = 2**-7  # one rounding apart, in bfloat16, twice over


def tower(reduction: str = "mean") -> Deep:
    """Sizes that are no multiple of a tile, in bfloat16 on the device."""
    return made(Deep(264, 344, 1001, reduction))


class Stream(nn.Module):
    """A norm of the input, SwiGLU and the residual: what is done to each row by itself."""

    def __init__(self, width: int = 264, inner: int = 344) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.last = nn.Linear(width, 136, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        x = x + self.down(functional.silu(gate) * value)
        return x, self.last(self.out(x))


def made(module: nn.Module) -> nn.Module:
    """A module in bfloat16, weights random, on the device."""
    fresh(module, 0)
    return module.to(DEVICE, BF16)


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, BF16)


def tower_inputs(*shape: int, seed: int = 0) -> list[Tensor]:
    targets = torch.randint(0, 1001, shape, generator=torch.Generator().manual_seed(seed))
    return [noise(*shape, 264, seed=seed).requires_grad_(), targets.to(DEVICE)]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Every tensor, to the bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 150), (4097,)])
def test_the_same_bits_run_after_run(shape):
    """Outputs and gradients of three runs and of a module compiled anew: reductions have one order."""
    module, inputs = tower(), tower_inputs(*shape)
    ours = compiled(module)
    runs = [run(ours, inputs, module, 0) for _ in range(3)] + [run(compiled(module), inputs, module, 0)]
    for other in runs[1:]:
        assert equal(runs[0].outputs, other.outputs)
        assert [n for n, g in runs[0].gradients.items() if not torch.equal(g, other.gradients[n])] == []


@pytest.mark.usefixtures("cuda_only")
def test_rows_alone_and_among_others():
    """C31: with ``batch_invariant`` a row's outputs and its gradient are the same bits alone and among 2, 64 and 4096
    others, wherever it stands."""
    module = made(Stream())
    ours = compiled(module, batch_invariant=True)
    many, cotangents = noise(4097, 264, seed=1), [noise(4097, n, seed=n) for n in (264, 136)]

    def at(rows: Tensor) -> list[Tensor]:
        x = many[rows].requires_grad_()
        outputs = ours(x)
        (dx,) = torch.autograd.grad(outputs, x, [g[rows] for g in cotangents])
        return [*outputs, dx]

    for row in (0, 1234, 4096):
        alone = at(torch.tensor([row], device=DEVICE))
        for others in (2, 64, 4096):
            rest = torch.arange(4097, device=DEVICE)
            rest = rest[rest != row][:others]
            place = others // 3
            rows = torch.cat([rest[:place], torch.tensor([row], device=DEVICE), rest[place:]])
            assert equal([t[place : place + 1] for t in at(rows)], alone), f"row {row} among {others} others"


# --- streams and graphs -----------------------------------------------------------------------------------------------


def step_of(module: nn.Module, call: Callable[..., tuple[Tensor, Tensor]], x: Tensor, targets: Tensor, g: Tensor):
    """Outputs, and the gradients for a unit of the loss and ``g`` of the stream."""
    loss, stream = call(x, targets)
    gradients = torch.autograd.grad([loss, stream], [x, *module.parameters()], [torch.ones_like(loss), g])
    return [loss.detach(), stream.detach(), *gradients]


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_cuda_graph(inner: str):
    """C28: forward and backward in a CUDA graph, replayed with new inputs and new upstream gradients: to the bit what
    the same compiled function gives outside of it."""
    module = tower()
    ours = compiled(module, inner=inner)
    x, targets = tower_inputs(300)
    g = noise(300, 264, seed=5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step_of(module, ours, x, targets, g)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step_of(module, ours, x, targets, g)
    for seed in (1, 2, 3):
        new_x, new_targets = tower_inputs(300, seed=seed)
        with torch.no_grad():
            x.copy_(new_x)
            targets.copy_(new_targets)
            g.copy_(noise(300, 264, seed=10 + seed))
        for t in found:
            t.fill_(float("nan"))
        graph.replay()
        replayed = [t.clone() for t in found]
        assert equal(replayed, step_of(module, ours, x, targets, g)), f"replay {seed}"


@pytest.mark.usefixtures("cuda_only")
def test_cuda_graph_of_a_plan_alone():
    """C28: the plans themselves, forward and backward, without torch.compile around them."""
    plan = segment_plan(width=264, inner=64, out=136)
    feed = {n: noise(*shape, seed=i) for i, (n, shape) in enumerate(segment_shapes(300, 264, 64, 136).items())}
    given = {"d_x2": noise(300, 264, seed=21), "d_out": noise(300, 136, seed=22)}
    both(plan, feed, given, 300)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(plan, feed, given, 300)
    for seed in (31, 32):
        for i, t in enumerate([*feed.values(), *given.values()]):
            t.copy_(noise(*t.shape, seed=100 * seed + i))
        graph.replay()
        replayed = {n: t.clone() for n, t in found.items()}
        for name, t in both(plan, feed, given, 300).items():
            assert torch.equal(replayed[name], t), name


@pytest.mark.usefixtures("cuda_only")
def test_side_stream():
    """C28: inputs made on a side stream, behind a long kernel, and used there, with no synchronisation by hand: kernels
    are launched on the current stream, and no other. A launch on the default stream would read NaN."""
    module = tower()
    ours = compiled(module)
    ready, targets = tower_inputs(300)
    g = noise(300, 264, seed=5)
    expected = step_of(module, ours, ready, targets, g)
    x = torch.full_like(ready, float("nan")).requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # once before, so that its memory is there: asking for more waits for the device
        step_of(module, ours, x, targets, g)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # about 0.3 s
        with torch.no_grad():
            x.copy_(ready)
        found = step_of(module, ours, x, targets, g)
    assert not side.query(), "the side stream was waited for"
    side.synchronize()
    assert equal(found, expected)


@pytest.mark.usefixtures("cuda_only")
def test_no_synchronisation():
    """A step, once compiled, waits for the device nowhere."""
    module = tower()
    ours = compiled(module)
    x, targets = tower_inputs(300)
    g = noise(300, 264, seed=5)
    step_of(module, ours, x, targets, g)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step_of(module, ours, x, targets, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- sizes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Last:
    """Rows of a run that are compared with the same rows alone."""

    rows: int
    alone: int = 16

    @property
    def where(self) -> slice:
        return slice(self.rows - self.alone, self.rows)


def both(plan: TrainingPlan, feed: dict[str, Tensor], given: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Outputs and gradients of a plan on the backend under test, by name."""

    def named(p: Plan, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        buffers = executable(p).run({n: memory[n] for n in p.inputs}, rows)
        return {n: buffers[v.buffer][slice(*v.rows)] if v.rows else buffers[v.buffer] for n, v in p.outputs}

    out = named(plan.forward, feed)
    kept = {n: out[o] for n, o in plan.saved}
    return out | named(plan.backward, {**feed, **kept, **given})


def segment_plan(width: int, inner: int, out: int) -> TrainingPlan:
    """A GEMM with a residual, RMSNorm, and a GEMM."""
    y, x = input_("y", tile(inner, bf16)), input_("x", tile(width, bf16))
    wo, wq = input_("wo", tile(inner, bf16, rows=width)), input_("wq", tile(width, bf16, rows=out))
    gain = input_("g", rowvec(width, bf16))
    stream = cast(add(x, cast(matmul(y, wo), bf16)), bf16)
    result = cast(matmul(rms_norm(stream, gain), wq), bf16)
    graph = Graph((y, x, wo, gain, wq), (("x2", stream), ("out", result)))
    return plan_training(graph, ["y", "x", "wo", "g", "wq"])


def segment_shapes(rows: int, width: int, inner: int, out: int) -> dict[str, tuple[int, ...]]:
    """The inputs of ``segment_plan``."""
    return {"y": (rows, inner), "x": (rows, width), "wo": (width, inner), "g": (width,), "wq": (out, width)}


def on_device(*shape: int) -> Tensor:
    """Normally distributed numbers, drawn on the device, where they are many."""
    return torch.randn(shape, device=DEVICE, dtype=BF16)


@pytest.mark.usefixtures("free_memory")
def test_rows_of_a_norm_past_two_to_the_31():
    """C12: 524,289 rows of 4096. The last rows, and those around element 2^31, equal the same rows alone."""
    rows, width = sized(524_289, 1025), sized(4096, 64)
    plan = segment_plan(width, 64, 64)
    torch.manual_seed(0)
    feed = {n: on_device(*s) for n, s in segment_shapes(rows, width, 64, 64).items()}
    feed["wo"] *= 64**-0.5
    feed["wq"] *= width**-0.5
    given = {"d_x2": on_device(rows, width), "d_out": on_device(rows, 64)}
    found = both(plan, feed, given, rows)
    last = Last(rows)
    small = {n: t[last.where] if n in ("x", "y") else t for n, t in feed.items()}
    alone = both(plan, small, {n: t[last.where] for n, t in given.items()}, last.alone)
    for name in ("x2", "out", "d_x", "d_y"):
        assert relative_error(found[name][last.where], alone[name]) < CLOSE, name
    for name in ("d_wo", "d_wq", "d_g"):
        assert bool(found[name].isfinite().all()), name
    # weight gradients see all rows: against float32 products of what was stored, in slices
    exact = sum(
        a.double().T @ b.double() for a, b in zip(found["d_x"].split(1 << 16), feed["y"].split(1 << 16), strict=True)
    )
    assert relative_error(found["d_wo"], exact) < CLOSE


@pytest.mark.usefixtures("free_memory")
def test_logits_past_two_to_the_31():
    """C12: 16,760 rows of logits at a vocabulary of 128,256. The loss and logits of the last rows, and their gradients,
    equal those of the same rows alone; and the head's gradient is that of all rows."""
    rows, vocabulary = sized(16_760, 300), sized(128_256, 1001)
    x, w = input_("x", tile(64, bf16)), input_("w", tile(64, bf16, rows=vocabulary))
    targets = input_("i", colvec(i32))
    logits = cast(matmul(x, w), bf16)
    loss = sub(logsumexp_row(cast(logits, f32)), select_column(cast(logits, f32), targets))
    plan = plan_training(Graph((x, w, targets), (("loss", loss), ("logits", logits))), ["x", "w"])
    torch.manual_seed(0)
    feed = {"x": on_device(rows, 64), "w": on_device(vocabulary, 64) * 0.125}
    feed["i"] = torch.randint(0, vocabulary, (rows,), device=DEVICE, dtype=torch.int32)
    given = {cotangent_name("loss"): torch.rand(rows, device=DEVICE)}
    given[cotangent_name("logits")] = (on_device(rows, vocabulary) * 1e-3).contiguous()
    found = both(plan, feed, given, rows)
    last = Last(rows)
    small = {n: t[last.where] if n in ("x", "i") else t for n, t in feed.items()}
    alone = both(plan, small, {n: t[last.where] for n, t in given.items()}, last.alone)
    for name in ("loss", "logits", "d_x"):
        assert relative_error(found[name][last.where], alone[name]) < CLOSE, name
    # the head's gradient, by hand: probability minus one, times the upstream value, on slices of rows
    exact = torch.zeros(vocabulary, 64, device=DEVICE)
    for part in torch.arange(rows, device=DEVICE).split(1024):
        z = found["logits"][part].float()
        p = torch.softmax(z, -1)
        p[torch.arange(len(part), device=DEVICE), feed["i"][part].long()] -= 1.0
        p = p * given["d_loss"][part, None] + given["d_logits"][part].float()
        exact += p.T @ feed["x"][part].float()
    assert relative_error(found["d_w"], exact) < CLOSE


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_zero_tokens(shape: tuple[int, ...], reduction: str):
    """C13: no tokens through a whole model: the loss is PyTorch's, gradients are zeros of the right shape and dtype."""
    module = tower(reduction)
    x, targets = tower_inputs(*shape)
    expected, theirs = module(x, targets)
    with recording() as found:
        loss, stream = compiled(module)(x, targets)
    assert counts(forward_plans(found))["gemms"] == 5
    assert (loss.shape, loss.dtype, stream.shape, stream.dtype) == (
        *(expected.shape, expected.dtype),
        *(theirs.shape, theirs.dtype),
    )
    torch.testing.assert_close(loss, expected, equal_nan=True)
    (loss.sum() + stream.sum()).backward()
    for name, p in [("x", x), *module.named_parameters()]:
        assert (p.grad.shape, p.grad.dtype) == (p.shape, BF16), name
        assert not p.grad.any(), name


# --- strides ----------------------------------------------------------------------------------------------------------


def test_upstream_gradient_that_is_expanded():
    """C10: a sum's gradient has strides 0, and so has one expanded by hand: the bits of an explicit tensor of ones."""
    module = made(Stream())
    ours = compiled(module)
    x = noise(300, 264).requires_grad_()
    leaves = [x, *module.parameters()]

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(ours(x), leaves, given)

    one = torch.ones((), device=DEVICE, dtype=BF16)
    expected = gradients(one.expand(300, 264).contiguous(), one.expand(300, 136).contiguous())
    assert equal(gradients(one.expand(300, 264), one.expand(1, 136).expand(300, 136)), expected)
    assert equal(torch.autograd.grad(sum(y.sum() for y in ours(x)), leaves), expected)
    strided = torch.stack([one.expand(300, 136)] * 2, -1)[..., 0]
    assert equal(gradients(one.expand(264, 300).contiguous().T, strided), expected)


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("layout", ["slice", "transposed", "strided", "expanded", "offset"])
def test_inputs_that_are_not_contiguous(layout: str, rows: int):
    """C11: a column slice that keeps its parent's row stride, with one token too, where it counts as contiguous; and
    other strides, and an offset that no 16 bytes divide. The bits are those of a contiguous copy."""
    module = made(Stream())
    ours = compiled(module)
    wide_, plain = noise(rows, 3 * 264, seed=1), noise(rows, 264, seed=2)
    x = {
        "slice": lambda: wide_[:, 264:528],
        "transposed": lambda: plain.T.contiguous().T,
        "strided": lambda: torch.stack([plain, plain], -1)[..., 0],
        "expanded": lambda: plain[:1].expand(rows, -1),
        "offset": lambda: torch.cat([plain.flatten()[:1], plain.flatten()])[1:].view(rows, 264),
    }[layout]()
    assert x.is_contiguous() == (layout == "offset" or (rows == 1 and layout != "strided"))
    found, expected = (run(ours, [t.detach().requires_grad_()], module, 0) for t in (x, x.contiguous().clone()))
    assert equal(found.outputs, expected.outputs)
    assert [n for n, g in found.gradients.items() if not torch.equal(g, expected.gradients[n])] == []


@pytest.mark.parametrize("layout", ["transposed", "slice"])
def test_weights_that_are_not_contiguous(layout: str):
    """A weight that is a transpose, and one that is a part of a larger one."""
    module, plain = made(Stream()), made(Stream())
    value = plain.last.weight.detach()
    other = value.T.contiguous().T if layout == "transposed" else torch.cat([value, value], 1)[:, :264]
    assert not other.is_contiguous()
    module.last.weight = nn.Parameter(other)
    inputs = [noise(300, 264).requires_grad_()]
    found, expected = (run(compiled(m), inputs, m, 0) for m in (module, plain))
    assert equal(found.outputs, expected.outputs)
    assert [n for n, g in found.gradients.items() if not torch.equal(g, expected.gradients[n])] == []


def test_a_weight_in_another_memory():
    """The address of a weight is looked up when the op runs: after ``load_state_dict(assign=True)`` the result is the
    new weight's, with nothing compiled again."""
    module, other = tower(), tower()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    ours = compiled(module)
    inputs = tower_inputs(300)
    run(ours, inputs, module, 0)
    module.load_state_dict({n: t.clone() for n, t in other.state_dict().items()}, assign=True)
    found, expected = run(ours, inputs, module, 0), run(compiled(other), inputs, other, 0)
    assert equal(found.outputs, expected.outputs)
    assert [n for n, g in found.gradients.items() if not torch.equal(g, expected.gradients[n])] == []


def test_nothing_that_is_not_ours_is_written_to():
    """Inputs, weights, outputs and incoming gradients keep their bits through forward and two backward passes, which
    give the same."""
    module = tower()
    x, targets = tower_inputs(300)
    loss, stream = compiled(module)(x, targets)
    g, one = noise(300, 264, seed=3), torch.ones_like(loss)
    leaves = [x, *module.parameters()]
    theirs = [*leaves, targets, loss, stream, g]
    before = [(t.detach().clone(), t._version) for t in theirs]
    first, second = (torch.autograd.grad([loss, stream], leaves, [one, g], retain_graph=True) for _ in range(2))
    assert equal(first, second)
    for t, (value, version) in zip(theirs, before, strict=True):
        assert torch.equal(t.detach(), value)
        assert t._version == version
    foreign = {t.untyped_storage().data_ptr() for t in theirs}
    assert foreign.isdisjoint(t.untyped_storage().data_ptr() for t in (*first, *second))
