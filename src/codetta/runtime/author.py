"""What an author of an epilogue asks of it: its derived backward programs, and its values on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.backends.reference.evaluate import TORCH, contract
from codetta.backends.reference.execute import compile_body
from codetta.backends.reference.tiles import fold
from codetta.core.node import Node, substitute
from codetta.core.types import ROWS, Dim, Kind, Sym, tile
from codetta.errors import ShapeError, UnsupportedError
from codetta.ir.build import cast, input_, matmul
from codetta.ir.graph import Graph
from codetta.ir.program import Gemm, Program, param_name
from codetta.lang.sizes import learn_sizes, with_sizes
from codetta.lang.source import program_text
from codetta.partition.plan import Plan, partial_outputs
from codetta.partition.training import TrainingPlan, plan_training

NEXT = "next_weight"  # the weight of the GEMM that takes the program's output
NEXT_OUTPUT = "next"
OPERANDS = ("operand", "weight")


@dataclass(frozen=True)
class Backward:
    """The derived backward of a program: its steps in order (data gradients with their epilogues, finalizes, weight
    gradients), and the forward program again, which also stores what backward needs."""

    forward: Program
    programs: tuple[Program, ...]
    training: TrainingPlan

    @property
    def plan(self) -> Plan:
        """The backward plan, which also has the next GEMM's weight gradient."""
        return self.training.backward

    def __iter__(self) -> Iterator[Program]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)

    def __getitem__(self, index: int) -> Program:
        return self.programs[index]

    def __str__(self) -> str:
        """The source of every program."""
        return "\n".join(program_text(p) for p in self.programs)


def vjp(program: Program, incoming: str | None = None, width: Dim | None = None) -> Backward:
    """The backward programs of an epilogue, derived.

    ``incoming`` is the output (default: the last Tile) that the next GEMM takes as its operand: that GEMM's data
    gradient brings the output's gradient as its accumulator, and the epilogue behind it is what is derived. The other
    outputs' gradients are read as ``d_<output>``. ``width`` is the number of columns of the next GEMM's result."""
    if program.role != "epilogue":
        raise UnsupportedError(f"{program.name} is a {program.role}", hint="only an epilogue has backward programs")
    tiles = float_tiles(program)
    if incoming is not None and incoming not in tiles:
        raise UnsupportedError(f"{program.name} stores no Tile {incoming!r}", hint=f"one of: {', '.join(tiles)}")
    graph = _with_gemms(program, incoming or (tiles[-1] if tiles else None), width or Sym("N2"))
    wrt = [str(n.attrs[0]) for n in graph.inputs if n.type.dtype.is_float]
    training = plan_training(graph, wrt, as_written=True)
    steps = [s for s in training.backward.steps if f"d_{NEXT}" not in s.stores]
    forward = next((s.program for s in training.forward.steps if s.kind == "gemm" and s.a == OPERANDS[0]), None)
    if forward is None:
        hint = "use the GEMM's result, or make it a @leftover, which has none"
        raise UnsupportedError(f"{program.name} stores nothing that depends on acc", hint=hint)
    return Backward(forward, tuple(s.program for s in steps), training)


def float_tiles(program: Program) -> list[str]:
    """The outputs that the next GEMM may take as its operand."""
    return [name for name, n in program.outputs if n.type.kind is Kind.TILE and n.type.dtype.is_float]


def _with_gemms(program: Program, incoming: str | None, width: Dim) -> Graph:
    """The program between the GEMM that feeds it and the one that takes its output."""
    acc, *params = program.params
    gemm = program.gemm or Gemm("nt", Sym("K"), acc.type.dtype)
    form, k, dtype = gemm.form, gemm.k, gemm.dtype
    if form == "tn":
        raise UnsupportedError(f"{program.name} belongs to a weight gradient", hint="bind it to an nt or nn GEMM")
    cols, rows = acc.type.cols or 0, acc.type.rows or 0
    x = input_(OPERANDS[0], tile(k, dtype, rows=rows))
    weight = input_(OPERANDS[1], tile(k, dtype, rows=cols) if form == "nt" else tile(cols, dtype, rows=k))
    bodies = substitute([n for _, n in program.outputs], {acc: matmul(x, weight, form)})
    outputs: list[tuple[str, Node]] = []
    inputs = [x, weight, *params]
    for (name, _), n in zip(program.outputs, bodies, strict=True):
        outputs.append((name, n))
        if name == incoming and n.type.cols is not None:
            operand = cast(n, dtype)
            after = input_(NEXT, tile(n.type.cols, dtype, rows=width))
            inputs.append(after)
            outputs[-1] = (NEXT_OUTPUT, cast(matmul(operand, after), dtype))
    return Graph(tuple(inputs), tuple(outputs))


def run(program: Program, *operands: Tensor, **params: Tensor | float) -> dict[str, Tensor]:
    """The outputs of a program on PyTorch tensors, reductions folded.

    An epilogue takes its GEMM's operands (x and w) or ``acc=``; every other parameter goes by its name."""
    values = dict(params)
    if operands:
        if program.role != "epilogue" or len(operands) != 2:
            raise ShapeError(f"{program.name}: {len(operands)} operands", hint="an epilogue takes two, others none")
        form = program.gemm.form if program.gemm is not None else "nt"
        values["acc"] = contract(form, operands[0], [operands[1]])
    names = [param_name(p) for p in program.params]
    if set(values) != set(names):
        missing, extra = sorted(set(names) - set(values)), sorted(set(values) - set(names))
        raise ShapeError(f"{program.name}: missing {missing}, unknown {extra}", hint=f"it takes {', '.join(names)}")
    sizes: dict[str, Dim] = {}
    tensors: list[Tensor] = []
    for p, name in zip(program.params, names, strict=True):
        t = torch.as_tensor(values[name])
        learn_sizes(sizes, name, p.type, t.shape)
        tensors.append(t if t.is_floating_point() and t.dim() else t.to(TORCH[p.type.dtype]))
    numbers = {name: size for name, size in sizes.items() if isinstance(size, int)}
    exact = with_sizes(program, {name: size for name, size in numbers.items() if name != ROWS.name})
    found = compile_body(exact)(tensors, numbers.get(ROWS.name, 0))
    whole = zip(exact.outputs, found, partial_outputs(exact), strict=True)
    return {name: fold(n, t) if in_parts else t for (name, n), t, in_parts in whole}
