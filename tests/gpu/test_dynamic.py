"""Kernels that take their tiles from a counter, and weight gradients on our mainloop."""

from __future__ import annotations

import pytest
import torch

from codetta.backends.hopper.choose import lowered_of
from codetta.backends.hopper.config import Config
from codetta.backends.hopper.tune import Case
from codetta.lang.source import parse_program

pytestmark = pytest.mark.gpu
RESIDUAL = parse_program(
    '@epilogue(gemm="nt", k=512, dtype=bf16)\n'
    "def p(acc: Tile[1024, f32], x: Tile[1024, bf16]):\n"
    "    h = acc + x\n    return dict(h=to(h, bf16), s=sum_row(h * h))\n"
)
WEIGHT_GRADIENT = parse_program(
    '@epilogue(gemm="tn", k="M", dtype=bf16)\ndef p(acc: Tile[768, 1024, f32]):\n    return dict(w=to(acc, bf16))\n'
)
STATIC, DYNAMIC = Config(128, 128, pingpong=True), Config(128, 128, pingpong=True, dynamic=True)


def made(program, rows: int, config: Config):
    """The launch of a kernel, what it writes (without the padding of partials), its trial and its job."""
    from codetta.backends.hopper.gemm import job_with, reduced
    from codetta.backends.hopper.trial import Trial

    case = Case(program, lowered_of(program), rows, None)
    trial, job = Trial(case, rows), job_with(program, case.lowered, config)
    run, outputs = trial.ours(job)
    written = [reduced(job, trial.sinks[i], t) if i in trial.sinks else t for i, t in enumerate(outputs)]
    return run, written, trial, job


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2), (1, 1)])
@pytest.mark.parametrize("rows", [1, 333, 5000])
def test_a_dynamic_kernel_gives_the_bits_of_a_static_one(rows, cluster):
    m, n = cluster
    run, outputs, *_ = made(RESIDUAL, rows, STATIC)
    run()
    wanted = [t.clone() for t in outputs]
    run, outputs, *_ = made(RESIDUAL, rows, Config(128, 128, True, cluster_m=m, cluster_n=n, dynamic=True))
    for _ in range(20):  # each launch leaves its counter at zero
        for t in outputs:
            t.fill_(float("nan"))
        run()
        assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))


def test_dynamic_kernels_on_two_streams_at_once():
    pairs = [made(RESIDUAL, 5000, DYNAMIC) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(50):
        for (run, *_), stream in zip(pairs, streams, strict=True):
            with torch.cuda.stream(stream):
                run()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(pairs[0][1], pairs[1][1], strict=True))  # the same random operands


def test_a_dynamic_kernel_in_a_graph():
    run, outputs, *_ = made(RESIDUAL, 5000, DYNAMIC)
    run()
    torch.cuda.synchronize()
    wanted = [t.clone() for t in outputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
        run()
    for _ in range(10):
        for t in outputs:
            t.fill_(float("nan"))
        graph.replay()
        run()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize("tokens", [1, 7, 1000, 4097])
@pytest.mark.parametrize(
    "config", [STATIC, DYNAMIC, Config(128, 256), Config(256, 128, cluster_m=1, cluster_n=2)], ids=str
)
def test_a_weight_gradient_over_any_number_of_tokens(tokens, config):
    _, _, trial, job = made(WEIGHT_GRADIENT, tokens, config)
    assert all(error < 5e-3 for _, error in trial.errors(job))
