"""Every step of forward and backward plans by itself, in float64 from the very tensors that it read.

A plan is run with all its buffers as outputs. Each step's program is then evaluated in float64 by the mirror, which
shares nothing with the backends, on what the step's inputs held. So an error is that of one kernel, and has its name.
Partials are the backend's own business, their shape too: a finalize is judged by its producer's exact reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

import mirror
from codetta.backends.reference.evaluate import TORCH
from codetta.core.types import DType, bf16, colvec, f16, f32, i32, rowvec, tile
from codetta.ir.build import add, apply, cast, input_, logsumexp_row, matmul, mul, select_column, sub
from codetta.ir.graph import Graph
from codetta.ir.ops import SILU
from codetta.ir.program import Program
from codetta.partition.plan import Plan, Step, View
from codetta.partition.training import TrainingPlan, cotangent_name, plan_training
from codetta.testing import relative_error
from graphs import Sizes, layer_norm, llama_segment, rms_norm
from target import DEVICE, executable, here

# All arithmetic of a step is float32, and each store rounds once, to nearest. Of values spread evenly over a binade
# the norm of the rounding error is 0.19 units in the last place of the norm: 0.24 allows one rounding, and not the 0.27
# of two. In float16 and float32 the hardware's tanh may show, which has 11 bits. A term left out is off by 1e-2.
LIMITS = {torch.bfloat16: 0.24 * 2**-7, torch.float16: 0.5 * 2**-10, torch.float32: 3e-4}
FEW = 4096  # of so few numbers the rounding error may be twice the usual, and a sum that cancels more than that

TOKENS = (4097, 127, 7, 1, 0)


# --- the plans --------------------------------------------------------------------------------------------------------


def lm_head(dtype: DType, width: int, vocabulary: int, *, first: bool) -> Graph:
    """A norm, the head, the loss a token. ``first``: the norm is that of an input, and logits are an output; else a
    GEMM with a residual is in front."""
    x, g, w = input_("x", tile(width, dtype)), input_("g", rowvec(width, dtype)), tile(width, dtype, rows=vocabulary)
    targets, y, wd = input_("i", colvec(i32)), input_("y", tile(72, dtype)), tile(72, dtype, rows=width)
    head, down = input_("wh", w), input_("wd", wd)
    stream = x if first else cast(add(x, cast(matmul(y, down), dtype)), dtype)
    logits = cast(matmul(rms_norm(stream, g), head), dtype)
    wide = cast(logits, f32)
    loss = sub(logsumexp_row(wide), select_column(wide, targets))
    inputs = (x, g, head, targets) if first else (x, g, head, targets, y, down)
    return Graph(inputs, (("loss", loss), *([("logits", logits)] if first else [])))


def odd_widths(dtype: DType) -> Graph:
    """Norms over 769 columns, RMS and layer, a GLU of 7 and a projection to 17, with biases: K and N of no tile, and of
    no 16 bytes."""
    x, y = input_("x", tile(769, dtype)), input_("y", tile(17, dtype))
    inputs = [x, y]

    def linear(a, key: str, width: int, out: int, *, bias: bool = False):
        inputs.append(input_(f"w{key}", tile(width, dtype, rows=out)))
        z = matmul(a, inputs[-1])
        if bias:
            inputs.append(input_(f"b{key}", rowvec(out, dtype)))
            z = add(z, inputs[-1])
        return cast(z, dtype)

    gains = [input_(f"g{i}", rowvec(769, dtype)) for i in range(3)]
    stream = cast(add(x, linear(y, "o", 17, 769)), dtype)
    h = rms_norm(stream, gains[0])
    glu = cast(mul(apply(SILU, linear(h, "g", 769, 7)), linear(h, "u", 769, 7)), dtype)
    stream = cast(add(stream, linear(glu, "d", 7, 769, bias=True)), dtype)
    out = linear(layer_norm(stream, gains[1], gains[2]), "q", 769, 17, bias=True)
    return Graph((*inputs, *gains), (("x2", stream), ("out", out)))


GRAPHS: dict[str, Callable[[DType], Graph]] = {
    "heads of 64": lambda d: llama_segment(d, Sizes(d=264, ffn=696, heads=4, kv_heads=2, inside=64)),
    "heads of 128": lambda d: llama_segment(d, Sizes(d=256, ffn=704, heads=2, kv_heads=1, inside=128)),
    "heads of 80": lambda d: llama_segment(d, Sizes(d=320, ffn=456, heads=4, kv_heads=2, inside=80), adjacent=True),
    "heads of 96": lambda d: llama_segment(d, Sizes(d=384, ffn=520, heads=4, kv_heads=2, inside=96), bias=True),
    "vocabulary 1001": lambda d: lm_head(d, 264, 1001, first=True),
    "vocabulary 257": lambda d: lm_head(d, 136, 257, first=False),
    "odd widths": odd_widths,
}
CASES = [
    *(pytest.param(name, bf16, id=f"{name}-bf16") for name in GRAPHS),
    *(pytest.param(name, f16, id=f"{name}-f16") for name in ("heads of 64", "vocabulary 257")),
]


@cache
def planned(name: str, dtype: DType) -> tuple[Graph, TrainingPlan, Plan, Plan]:
    """The graph, its training plan, and both plans with every buffer among the outputs."""
    graph = GRAPHS[name](dtype)
    wrt = [mirror.name(n) for n in graph.inputs if n.type.dtype.is_float and mirror.name(n) not in ("cos", "sin")]
    training = plan_training(graph, wrt)
    return graph, training, exposed(training.forward), exposed(training.backward)


def exposed(plan: Plan) -> Plan:
    """The plan with all that it stores as outputs, but partials."""
    stored = [b for s in plan.steps for b in s.stores if b not in plan.partials]
    return replace(plan, outputs=tuple((b, View(b)) for b in dict.fromkeys(stored)))


# --- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What a plan's buffers held after a run, inputs included."""

    plan: Plan
    buffers: dict[str, Tensor]
    rows: int


def executed(plan: Plan, feed: Mapping[str, Tensor], rows: int) -> Memory:
    """A run on the backend under test; inputs are left as they were."""
    inputs = {n: feed[n] for n in plan.inputs}
    before = {n: t.clone() for n, t in inputs.items()}
    found = executable(plan).run(inputs, rows)
    assert not [n for n, t in before.items() if not torch.equal(t, inputs[n])], "inputs were modified"
    return Memory(plan, {**inputs, **found}, rows)


def misses(memory: Memory) -> Iterator[str]:
    """What is wrong, by step and output."""
    exact: dict[str, Tensor] = {}  # the partials, folded
    for number, step in enumerate(memory.plan.steps):
        want = float64(step, memory, exact)
        for store, (output, node) in zip(step.stores, step.program.outputs, strict=True):
            if store in memory.plan.partials:
                exact[store] = want[output]
                continue
            got, where = memory.buffers[store], f"step {number}, {step.kind} {step.program.name}: {output}"
            dtype, shape = TORCH[node.type.dtype], tuple(want[output].shape)
            if (got.dtype, tuple(got.shape)) != (dtype, shape):
                yield f"{where} is {got.dtype} {tuple(got.shape)}, not {dtype} {shape}"
            elif (error := relative_error(got, want[output])) > (limit := allowed(want[output], dtype)):
                yield f"{where}: relative error {error:.3g}, at most {limit:.3g} is allowed"


def float64(step: Step, memory: Memory, exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of one step, reductions whole, from what its inputs held."""
    values = [exact[n] if n in exact else memory.buffers[n] for n in step.loads]
    values = [v.double() if v.is_floating_point() else v for v in values]
    if step.program.gemm is not None:
        a, b = memory.buffers[step.a].double(), [memory.buffers[n].double() for n in step.b]
        values.insert(0, product(step.program, a, b))
    names = [mirror.name(p) for p in step.program.params]
    graph = Graph(step.program.params, step.program.outputs)
    with torch.device(DEVICE), torch.no_grad():
        return mirror.outputs(graph, dict(zip(names, values, strict=True)), memory.rows)


def product(program: Program, a: Tensor, b: list[Tensor]) -> Tensor:
    """The GEMM; several weights lie under each other."""
    assert program.gemm is not None
    return mirror.CONTRACT[program.gemm.form](a, torch.cat(b))


def allowed(want: Tensor, dtype: torch.dtype) -> float:
    """The largest relative error of a tensor that was rounded once."""
    if want.numel() > FEW:
        return LIMITS[dtype]
    return 0.5 * torch.finfo(dtype).eps if dtype is not torch.float32 else 10 * LIMITS[dtype]


def feed_of(graph: Graph, rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs in their dtypes: weights of about unit gain, targets in the whole vocabulary or none."""
    values = mirror.random_feed(graph, rows, seed)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for n in graph.inputs:
        name, t = mirror.name(n), values[mirror.name(n)].detach()
        if n.type.rows is not None and isinstance(n.type.rows, int) and t.dim() == 2:
            t = t * t.shape[1] ** -0.5
        elif name in ("cos", "sin"):
            t = t.clamp(-1.0, 1.0)
        elif not n.type.dtype.is_float:
            vocabulary = values["wh"].shape[0]
            t = torch.randint(-1, vocabulary, t.shape, generator=generator)
        found[name] = here(t.to(TORCH[n.type.dtype]))
    return found


def cotangents_of(graph: Graph, rows: int) -> dict[str, Tensor]:
    """Random incoming gradients, by the names that backward gives them."""
    generator = torch.Generator().manual_seed(99)
    found = {}
    for name, n in graph.outputs:
        noise = torch.randn(mirror.shape(n.type, rows), generator=generator)
        found[cotangent_name(name)] = here(noise.to(TORCH[n.type.dtype]))
    return found


def both(name: str, dtype: DType, rows: int) -> tuple[Memory, Memory]:
    """Forward, then backward on what it kept."""
    graph, training, forward, backward = planned(name, dtype)
    feed = feed_of(graph, rows)
    first = executed(forward, feed, rows)
    views = dict(training.forward.outputs)
    kept = {n: taken(first.buffers, views[output]) for n, output in training.saved}
    return first, executed(backward, {**feed, **kept, **cotangents_of(graph, rows)}, rows)


def taken(buffers: Mapping[str, Tensor], view: View) -> Tensor:
    """A view of a buffer."""
    return buffers[view.buffer][slice(*view.rows)] if view.rows else buffers[view.buffer]


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", TOKENS)
@pytest.mark.parametrize("name, dtype", CASES)
def test_every_step(name: str, dtype: DType, rows: int):
    """Epilogues, finalizes and leftovers of forward and backward: one rounding away from float64."""
    for memory in both(name, dtype, rows):
        found = list(misses(memory))
        assert not found, "\n".join(found)


def test_the_plans_hold_what_they_are_to_test():
    """Residual and partial norm, SwiGLU with what it keeps, q, k, v and their rotation, the loss with its target;
    data gradients with an epilogue, weight gradients, finalizes, leftovers."""
    steps = {name: [s for p in planned(name, bf16)[2:] for s in p.steps] for name in GRAPHS}
    count = {n: (sum(s.kind == "gemm" for s in ss), sum(s.has_epilogue for s in ss)) for n, ss in steps.items()}
    assert count["heads of 64"] == (12, 7)
    assert count["vocabulary 257"][0] == 6
    for name, found in steps.items():
        assert {"gemm", "finalize", "leftover"} <= {s.kind for s in found}, name


@pytest.mark.parametrize("change", [1.01, float("nan"), 0.0])
def test_a_wrong_kernel_is_named(change: float):
    """An output that is off by one per cent in one tile, was not written in one place, or is zero there."""
    forward, _ = both("heads of 64", bf16, 127)
    assert not list(misses(forward))
    step = forward.plan.steps[2]
    wrong = forward.buffers[step.stores[0]].clone()
    wrong[:, :128] *= change
    found = list(misses(replace(forward, buffers={**forward.buffers, step.stores[0]: wrong})))
    assert any(f.startswith(f"step 2, gemm {step.program.name}: ") for f in found)
