"""Kernels' stand-in on CPU tensors: the generated source of a GEMM's epilogue on torch, row kernels in Triton's
interpreter. What it shows is everything around the kernels: places, views, shapes of partials, what is written over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import interpreted
import mirror
from codetta.backends.hopper import steps
from codetta.backends.hopper.emulate import emulate
from codetta.backends.hopper.gemm import Job
from codetta.backends.hopper.lowered import Lowered, Sink

EMPTY = {"sum": 0.0, "max": -torch.inf, "absmax": 0.0, "lse": -torch.inf}


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Replace the kernels, and poison what they are to write."""
    patch.setattr(steps, "compiled", lambda job: job)
    patch.setattr(steps, "launch", launch)
    patch.setattr(steps, "matmul", matmul)
    interpreted.as_a_gpu(patch)


def matmul(form: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The library's GEMM: rounded once."""
    return mirror.CONTRACT[form](a.float(), b.float()).to(dtype)


def launch(job: Job, a: Tensor, b: Tensor, given: Mapping[str, Any]) -> None:
    """A kernel: it reads and writes what it is given by name, and nothing else."""
    wide = a.float().mT.contiguous() if job.form == "tn" else a.float()  # a weight gradient's comes transposed
    acc = mirror.CONTRACT[job.form](wide, b.float())
    named, params, outputs = by_name(job.lowered, given)
    found = emulate(named, acc, [acc, *params])
    for i, t in enumerate(outputs):
        sink = next((s for s in named.sinks if s.output == i), None)
        if sink is None or sink.kind == "select":
            t.copy_(found[i])
        else:
            in_parts(sink, t, found[i], job.config.tile_n)


def by_name(lowered: Lowered, given: Mapping[str, Any]) -> tuple[Lowered, list[Tensor], list[Tensor]]:
    """The function with a parameter and an output for each name, which are whole: views were taken before."""
    params: list[Tensor] = []
    outputs: list[Tensor] = []

    def param(name: str) -> int:
        params.append(given[name].clone())  # a kernel reads before it writes
        return len(params)

    def output(name: str) -> int:
        outputs.append(given[name])
        return len(outputs) - 1

    operands = tuple(replace(o, param=param(o.name), columns=None) for o in lowered.operands)
    stores = tuple(replace(s, output=output(s.name), columns=None) for s in lowered.stores)
    sinks = tuple(
        replace(s, output=output(s.name), columns=None, index=param(f"i{s.index}") if s.kind == "select" else -1)
        for s in lowered.sinks
    )
    groups = tuple(replace(g, output=output(g.name)) for g in lowered.groups)
    whole = replace(lowered, operands=operands, stores=stores, sinks=sinks, groups=groups)
    return whole, params, outputs


def in_parts(sink: Sink, t: Tensor, total: Tensor, tile_n: int) -> None:
    """A reduction in one of its parts, nothing in the others; what belongs to other columns is not to be read."""
    if sink.source is not None:
        t.fill_(torch.nan)
        start, stop = sink.source if sink.over_rows else (s // tile_n for s in sink.source)
        t = t[:, start:stop]
    t.fill_(EMPTY[sink.kind.rpartition("_")[2]])
    (t[0] if sink.over_rows else t[:, 0]).copy_(total)
