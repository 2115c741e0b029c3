"""A segment of a model after each pass, or an epilogue that somebody wrote."""

from __future__ import annotations

from typing import Any

import torch

from codetta.audit.graph_text import Names
from codetta.audit.models import Subject
from codetta.audit.passes import Pass, Shown, forward_passes, graph_pass, new_lines, plan_passes, training_passes
from codetta.capture.backend import captured
from codetta.capture.segment import token_rows
from codetta.errors import SettingsError
from codetta.ir.graph import Graph
from codetta.ir.program import Program
from codetta.lang.source import program_text
from codetta.partition.build import make_plan
from codetta.runtime.author import vjp


def show_segment(subject: Subject, index: int | None, memory: str = "balanced") -> Shown:
    """The passes of one segment of a model: number ``index``, or the first with the most GEMMs."""
    options: dict[str, Any] = {"kernels": "reference", "memory": memory}
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        graphs = captured(subject.model, options=options, **subject.batch)
    found = [pair for graph in graphs for pair in graph.compiled()]
    if not found:
        raise SettingsError(f"{subject.title}: nothing was understood", hint="codetta explain says why")
    if index is not None and not 0 <= index < len(found):
        raise SettingsError(f"no segment {index}", hint=f"there are {len(found)}, from 0")
    most = max(range(len(found)), key=lambda i: len(found[i][0].graph.contractions))
    segment, compiled = found[most if index is None else index]
    names, rows = Names(), token_rows(segment)
    title = f"{subject.title}: segment {most if index is None else index} of {len(found)}, M = {rows:,}"
    passes = forward_passes(compiled.graph, names)
    if compiled.wrt:
        passes += training_passes(compiled.training, names, rows)
    else:
        passes += plan_passes({"forward": compiled.forward}, rows)
    return Shown(title, tuple(passes))


def show_program(written: str, traced: Program, real: Program, rows: int, width: int) -> Shown:
    """The passes of an authored program: its source, as it is understood, at real sizes, between the GEMMs around it.

    ``width`` is that of the next GEMM's result."""
    texts = [program_text(p).rstrip() for p in (traced, real)]
    passes = [
        Pass("written", "the source in the file", written.rstrip()),
        Pass("traced", "the same as it is understood; tracing this text gives it again", texts[0]),
        Pass("at real sizes", "as it is compiled: sizes, and the dtypes in memory", texts[1], new_lines(*texts)),
    ]
    names = Names()
    if real.role == "epilogue" and real.gemm is not None and real.gemm.form != "tn":
        training = vjp(real, width=width).training
        between = "a GEMM feeds it and another takes its output; what a person wrote is not rearranged"
        passes.append(graph_pass("between its GEMMs", between, training.graph, names))
        passes += training_passes(training, names, rows)
    else:
        passes += plan_passes({"forward": make_plan(Graph(real.params, real.outputs))}, rows)
    return Shown(f"{traced.name} ({traced.role})", tuple(passes))
