"""Whether a program computes what its reference does: values, stored values, the kernel's source, derived gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from codetta.audit.runs import poisoned_memory
from codetta.author.bind import Draw, compiled_form, draws, size_problem, wide_form
from codetta.author.compare import EXACT, LOWERED, ROUNDED, STORED, Compared, difference, worst
from codetta.author.file import Authored
from codetta.author.inputs import (
    ACC,
    Given,
    Tensors,
    draw_inputs,
    reference_gradients,
    reference_outputs,
    rows_of,
)
from codetta.backends.hopper.choose import lowered_of
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.emulate import emulate
from codetta.backends.reference.evaluate import TORCH
from codetta.backends.reference.execute import Executable, compile_body
from codetta.backends.reference.tiles import fold
from codetta.core.types import Kind
from codetta.errors import ShapeError, TypeMismatch
from codetta.ir import ops
from codetta.ir.graph import Graph
from codetta.ir.program import Program, param_name
from codetta.partition.plan import Plan, partial_outputs
from codetta.partition.size import dim
from codetta.partition.training import TrainingPlan, cotangent_name, plan_training
from codetta.runtime.author import NEXT, NEXT_OUTPUT, float_tiles, run, vjp

NEXT_WIDTH = 11  # columns of the GEMM behind, in the check of gradients
EMULATED_ROWS = 37


def compare_all(authored: Authored, sizes: Mapping[str, int], *, quick: bool = False) -> list[Compared]:
    """Every comparison of a program with its reference, the worst of all draws."""
    found: list[Compared] = []
    with warnings.catch_warnings(), poisoned_memory():
        warnings.simplefilter("ignore")  # that an operator has no deterministic form is of no interest here
        for draw in draws(authored.program, quick=quick):
            try:
                wide = wide_form(authored.program, draw)
            except (ShapeError, TypeMismatch) as error:
                raise size_problem(error, authored.program, draw) from error
            given = draw_inputs(authored, wide, draw)
            values = list(_values(authored, wide, given, draw))
            found += values
            if any(v.worst.problem for v in values):
                continue  # an output of another shape has no gradient to compare
            found += _stored(authored, given, draw)
            if has_backward(wide):
                found += gradients(authored, wide, given, draw)
        if not any(c.worst.problem for c in found):
            found += _lowered(authored, sizes)
    return worst(found)


def _values(authored: Authored, wide: Program, given: Given, draw: Draw) -> Iterator[Compared]:
    """The program in float64."""
    expected = reference_outputs(authored, given.params)
    got = run(wide, **given.params)
    for name, want in expected.items():
        yield Compared(name, "value", EXACT, difference(got[name], want), str(draw))


def _stored(authored: Authored, given: Given, draw: Draw) -> Iterator[Compared]:
    """The program in the dtypes in which it is compiled, from inputs in theirs; the accumulator is float32."""
    narrow = compiled_form(authored.program, {**draw.sizes, "K": draw.inner})
    params = {param_name(p): given.params[param_name(p)].to(TORCH[p.type.dtype]) for p in narrow.params}
    expected = reference_outputs(authored, {n: _double(t) for n, t in params.items()})
    got = run(narrow, **params)
    for name, n in narrow.outputs:
        limit = STORED.get(TORCH[n.type.dtype], EXACT)
        yield Compared(name, "stored", limit, difference(got[name], expected[name]), str(draw))


# --- the derived backward ---------------------------------------------------------------------------------------------


def gradients(authored: Authored, wide: Program, given: Given, draw: Draw) -> Iterator[Compared]:
    """The derived forward and backward plans in float64, as ``codetta check`` prints them, against autograd."""
    rows = rows_of(wide, draw)
    random = torch.Generator().manual_seed(draw.seed + 99)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    training, behind = derived(wide)
    expected = reference_outputs(authored, given.params)
    following = {behind: noise(NEXT_WIDTH, expected[behind].shape[1])} if behind else {}
    cotangents = {
        name: noise(draw.rows, NEXT_WIDTH) if name in following else noise(*expected[name].shape)
        for name, n in wide.outputs
        if n.type.dtype.is_float
    }
    feed = {**given.leaves, **({NEXT: following[behind]} if behind else {})}
    forward = _outputs(training.forward, feed, rows)
    names = {name: NEXT_OUTPUT if name in following else name for name in cotangents}
    for name, want in expected.items():
        passed_on = want @ following[name].T if name in following else want
        found = difference(forward.get(names.get(name, name)), passed_on)
        yield Compared(name, "forward", EXACT, found, str(draw))
    saved = {name: forward[output] for name, output in training.saved if output in forward}
    incoming = {cotangent_name(names[name]): g for name, g in cotangents.items()}
    known = {**feed, **saved, **incoming}
    backward = _outputs(training.backward, {n: known[n] for n in training.backward.inputs}, rows)
    for name, want in reference_gradients(authored, wide, given, cotangents, following).items():
        own = NEXT if name in following else name
        found = difference(backward.get(cotangent_name(own), torch.zeros_like(want)), want)
        yield Compared(cotangent_name(own), "gradient", EXACT, found, str(draw))


def has_backward(program: Program) -> bool:
    """Whether a program has derived backward programs: an epilogue behind a weight gradient has none."""
    return program.gemm is None or program.gemm.form != "tn"


def derived(program: Program) -> tuple[TrainingPlan, str | None]:
    """Forward and backward of a program, and its output that the GEMM behind it takes, if one does."""
    if program.role == "epilogue":
        tiles = float_tiles(program)
        return vjp(program, width=NEXT_WIDTH).training, tiles[-1] if tiles else None
    graph = Graph(program.params, program.outputs)
    wrt = [param_name(p) for p in program.params if p.type.dtype.is_float]
    return plan_training(graph, wrt, as_written=True), None


def _outputs(plan: Plan, feed: Mapping[str, Tensor], rows: int) -> Tensors:
    """A plan's outputs by name."""
    memory = Executable(plan).run({n: t for n, t in feed.items() if n in plan.inputs}, rows)
    return {name: memory[v.buffer][slice(*v.rows)] if v.rows else memory[v.buffer] for name, v in plan.outputs}


# --- the kernel's source ----------------------------------------------------------------------------------------------


def _lowered(authored: Authored, sizes: Mapping[str, int]) -> Iterator[Compared]:
    """The epilogue's generated source in float32 against the reference, at real sizes and few rows."""
    if authored.program.role != "epilogue":
        return
    program = compiled_form(authored.program, sizes)
    rows = program.params[0].type.rows
    draw = Draw(rows if isinstance(rows, int) else EMULATED_ROWS, {n: s for n, s in sizes.items() if n != "M"}, 8, 0)
    try:
        lowered = lowered_of(program)
    except NotLowered:
        return  # a GEMM and a generated map behind it: there is no source of one kernel
    given = draw_inputs(authored, program, draw)
    dtypes = {param_name(p): TORCH[p.type.dtype] for p in program.params}
    params = {n: _float(given.params[n].to(dtype)) for n, dtype in dtypes.items()}
    expected = reference_outputs(authored, {n: _double(t) for n, t in params.items()})
    got = emulate(lowered, params[ACC], list(params.values()))
    limit = ROUNDED if _rounds_inside(program) else LOWERED
    for i, (name, _) in enumerate(program.outputs):
        yield Compared(name, "lowered", limit, difference(got.get(i), expected[name]), str(draw))


def emulated(programs: Sequence[Program], rows: int = EMULATED_ROWS) -> Iterator[Compared]:
    """Of derived programs, the generated source in float64 against the program itself."""
    for program in programs:
        if program.gemm is None or program.is_trivial:
            continue
        try:
            lowered = lowered_of(program)
        except NotLowered:
            continue
        random = torch.Generator().manual_seed(7)
        values = []
        for p in program.params:
            shape = [dim(d, rows) for d in (p.type.rows, p.type.cols) if d is not None]
            drawn = torch.randn(shape, generator=random, dtype=torch.float64)
            integers = torch.randint(0, 8, shape, generator=random).to(TORCH[p.type.dtype])
            positive = drawn.abs() + 0.5 if p.type.kind in (Kind.COLVEC, Kind.GROUPVEC) else drawn
            values.append(positive if p.type.dtype.is_float else integers)
        got = emulate(lowered, values[0], values)
        whole = zip(program.outputs, compile_body(program)(values, rows), partial_outputs(program), strict=True)
        for i, ((name, n), t, in_parts) in enumerate(whole):
            want = fold(n, t) if in_parts else t
            limit = STORED.get(want.dtype, EXACT)
            found = difference(got.get(i), want)
            yield Compared(f"{program.name}.{name}", "lowered", limit, found, f"M={rows}, seed=7")


def _rounds_inside(program: Program) -> bool:
    stored = {n for _, n in program.outputs}
    return any(n.op is ops.CAST and n.type.dtype.bytes == 2 and (n not in stored) for n in program.body)


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _float(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() else t
