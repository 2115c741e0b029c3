"""Whole training plans, forward and backward, against float64 and next to eager in the same dtype."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drive
import mirror
from cases.test_random import RandomModule
from codetta.audit.verify import SEEDS
from codetta.backends.reference.evaluate import TORCH
from codetta.core.types import DType, bf16, f16, f32, rowvec, tile
from codetta.ir.build import add, cast, input_, matmul
from codetta.ir.graph import Graph
from codetta.partition.cut import MEMORY, Memory
from codetta.partition.training import TrainingPlan, plan_training
from codetta.testing import Bar, Errors, pooled, relative_error
from graphs import ODD, USUAL, Sizes, draw, llama_segment, rms_norm, trained
from target import DEVICE, executable, here
from ways import BARS, agree

SIZES = Sizes(
    d=264, ffn=696, heads=4, kv_heads=2, inside=64
)  # those of test_programs, so that kernels are compiled once


# --- a Llama's segment, plainly ---------------------------------------------------------------------------------------


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm as transformers' Llama has it."""
    wide = x if x.dtype is torch.float64 else x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The halves of each head turned."""
    heads = x.unflatten(-1, (-1, SIZES.inside))
    a, b = heads.chunk(2, -1)
    return (heads * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]).flatten(-2)


def segment(t: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From attention's output to the next attention's inputs, in PyTorch's own operators."""
    x1 = t["x"] + functional.linear(t["y"], t["wo"])
    h = norm(x1, t["g1"])
    x2 = x1 + functional.linear(functional.silu(functional.linear(h, t["wg"])) * functional.linear(h, t["wu"]), t["wd"])
    h = norm(x2, t["g2"])
    q, k = (rotated(functional.linear(h, t[w]), t["cos"], t["sin"]) for w in ("wq", "wk"))
    return {"x2": x2, "q": q, "k": k, "v": functional.linear(h, t["wv"])}


def differentiated(feed: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], dtype: torch.dtype, wrt: list[str]):
    """Outputs and gradients of the plain segment in a dtype."""
    leaves = {n: t.detach().to(dtype).requires_grad_(n in wrt) for n, t in feed.items()}
    found = segment(leaves)
    ends, given = list(found.values()), [cotangents[n].to(dtype) for n in found]
    gradients = torch.autograd.grad(ends, [leaves[n] for n in wrt], given)
    return {**{n: t.detach() for n, t in found.items()}, **dict(zip([f"d_{n}" for n in wrt], gradients, strict=True))}


@cache
def planned(dtype: DType, memory: Memory) -> tuple[Graph, TrainingPlan]:
    """The segment's graph and its plan."""
    graph = llama_segment(dtype, SIZES)
    return graph, plan_training(graph, trained(graph), memory)


def feed_of(graph: Graph, rows: int, seed: int) -> dict[str, Tensor]:
    """Random inputs in their dtypes, weights of unit gain, gains around one."""
    found = {}
    for n in graph.inputs:
        name, t = mirror.name(n), mirror.random_feed(Graph((n,), ()), rows, seed)[mirror.name(n)].detach()
        if name.startswith("w"):
            t = t * t.shape[1] ** -0.5
        elif name.startswith("g"):
            t = 1.0 + 0.3 * t.clamp(-2.0, 2.0)
        elif name in ("cos", "sin"):  # of angles: both halves of a head turn by the same
            angle = (t[:, : t.shape[1] // 2] * 0.0 + torch.arange(t.shape[0])[:, None]).double()
            angle = angle / 1e4 ** (torch.arange(angle.shape[1]) / angle.shape[1])
            t = getattr(torch.cat([angle, angle], -1), name)()
        else:
            generator = torch.Generator().manual_seed(1000 * seed + len(found))
            t = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        found[name] = here(t.to(TORCH[n.type.dtype]))
    return found


@pytest.mark.parametrize("rows", [513, 7])
@pytest.mark.parametrize(
    "dtype, memory", [*((bf16, m) for m in MEMORY), (f16, "balanced")], ids=[*(f"bf16-{m}" for m in MEMORY), "f16"]
)
def test_llama_segment(dtype: DType, memory: Memory, rows: int):
    """Each output and gradient clears the bar, in every memory mode."""
    graph, plan = planned(dtype, memory)
    wrt = trained(graph)
    errors: dict[str, list[Errors]] = {}
    for seed in range(SEEDS):
        feed = feed_of(graph, rows, seed)
        generator = torch.Generator().manual_seed(seed)
        shapes = {n: mirror.shape(node.type, rows) for n, node in graph.outputs}
        given = {n: here(torch.randn(s, generator=generator).to(TORCH[dtype])) for n, s in shapes.items()}
        out, got = drive.train(plan, feed, given, rows, executable)
        ours = {**{n: out[n] for n in shapes}, **{f"d_{n}": g for n, g in got.items()}}
        eager, exact = (differentiated(feed, given, d, wrt) for d in (TORCH[dtype], torch.float64))
        assert ours.keys() == exact.keys()
        for name, want in exact.items():
            assert (ours[name].shape, ours[name].dtype) == (eager[name].shape, eager[name].dtype), name
            pair = relative_error(ours[name], want), relative_error(eager[name], want)
            errors.setdefault(name, []).append(Errors(*pair, TORCH[dtype]))
    judged({n: pooled(es) for n, es in errors.items()}, Bar())


def judged(errors: Mapping[str, Errors], bar: Bar) -> None:
    """Every tensor clears the bar, and so do all together."""
    found = [f"{n}: {why}" for n, e in errors.items() if (why := bar.why_not(e)) is not None]
    together = bar.why_not_all(errors.values())
    assert not found + ([together] if together else []), "\n".join([*found, together or ""])


# --- gradients that are asked for -------------------------------------------------------------------------------------


def test_every_choice_of_gradients():
    """C24: all combinations of input, residual, gain, weight and bias: those gradients and no others, each as the
    reference's, and no GEMM in vain."""
    x, r, w = input_("x", tile(264, bf16)), input_("r", tile(264, bf16)), input_("w", tile(264, bf16, rows=136))
    g, b = input_("g", rowvec(264, bf16)), input_("b", rowvec(136, bf16))
    out = cast(add(matmul(rms_norm(cast(add(x, r), bf16), g), w), b), bf16)
    graph = Graph((x, r, g, w, b), (("y", out),))
    feed = {n: here(t) for n, t in drive.typed(graph, mirror.random_feed(graph, 150)).items()}
    given = {"y": torch.randn(150, 136, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)}
    expected, gradients = drive.train(plan_training(graph, list(feed)), feed, given, 150)
    for chosen in itertools.chain.from_iterable(itertools.combinations(feed, n) for n in range(1, 6)):
        plan = plan_training(graph, chosen)
        found, got = drive.train(plan, feed, given, 150, executable)
        assert relative_error(found["y"], expected["y"]) < 2**-7
        assert got.keys() == set(chosen)
        assert all(relative_error(got[n], gradients[n]) < 2**-6 for n in chosen), chosen
        assert plan.backward.count("gemm") == ("w" in chosen) + (not {"x", "r", "g"}.isdisjoint(chosen))


# --- graphs that are no Llama -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, seed", [*((bf16, s) for s in range(5)), *((f32, s) for s in range(5, 7))])
def test_random_graph(dtype: DType, seed: int):
    """A random graph of linears, norms, maps, pairs, rotations. The same plan on the reference, which rounds where we
    do, stands for eager, of which there is none; float64 is the mirror's."""
    graph = draw(Random(seed), USUAL + ODD, most=8, dtype=dtype)
    wrt, rows = drive.float_inputs(graph), 150
    plan = plan_training(graph, wrt)
    feed = mirror.random_feed(graph, rows, seed)
    want = mirror.outputs(graph, feed, rows)
    cotangents = mirror.random_cotangents(want)
    typed = drive.typed(graph, cotangents)
    exact = {**want, **mirror.gradients(want, feed, typed, wrt)}
    inputs = {n: here(t) for n, t in drive.typed(graph, feed).items()}
    given = {n: here(t) for n, t in typed.items()}
    (out, got), (theirs, reference) = (
        drive.train(plan, inputs, given, rows, *backend) for backend in ((executable,), ())
    )
    bar, misses = BARS.get(TORCH[dtype], Bar(units=1.0)), []
    assert got.keys() == reference.keys()
    for name, a, b in [*((n, out[n], theirs[n]) for n in want), *((n, g, reference[n]) for n, g in got.items())]:
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        truth = exact[name]
        e = Errors(*(relative_error(x.cpu(), truth if truth is not None else x.cpu() * 0) for x in (a, b)), a.dtype)
        if (why := bar.why_not(e)) is not None:
            misses.append(f"{name}: {why}")
    assert not misses, "\n".join(misses)


@pytest.mark.parametrize(
    "dtype, seed", [*((torch.bfloat16, s) for s in range(3)), *((torch.float32, s) for s in (3, 4))]
)
def test_random_module(dtype: torch.dtype, seed: int):
    """C34: a random module through torch.compile. What is no segment runs in eager PyTorch."""
    module, wide = (RandomModule(Random(seed), 3) for _ in range(2))  # its steps are closures: no copy of it would do
    module.to(dtype)
    width = module.widths[0]

    def drawn(generator: torch.Generator) -> list[Tensor]:
        return [torch.randn(16, 24, width, generator=generator).to(dtype).requires_grad_()]

    agree(module, drawn, wide=wide)


class Perceptron(nn.Module):
    """Two linears with a bias and a curve between them, in a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(264), nn.Linear(264, 1000), nn.Linear(1000, 264)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(functional.gelu(self.a(self.norm(x))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_perceptron(dtype: torch.dtype):
    """LayerNorm, biases and GELU on tensors of more than one tile each way."""
    agree(Perceptron().to(dtype), lambda g: [torch.randn(300, 264, generator=g).to(dtype).requires_grad_()], gemms=2)
