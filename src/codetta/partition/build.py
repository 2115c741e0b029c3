"""Drafts become named steps: closed Programs over parameters, bound to buffers."""

from __future__ import annotations

import re
from keyword import iskeyword

from codetta import settings
from codetta.core.node import Node, substitute
from codetta.core.types import Kind, Type
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.ir.build import cast, input_
from codetta.ir.graph import Graph
from codetta.ir.program import Gemm, Program, Role
from codetta.lang.functions import LANGUAGE
from codetta.partition.assign import (
    Assignment,
    Draft,
    Slot,
    assign,
    compared,
    operands,
    own_roots,
    storage_dtypes,
    stored_root,
)
from codetta.partition.plan import Plan, Step, View, partial_outputs
from codetta.partition.schedule import Schedule
from codetta.partition.verify import verify_plan


def make_plan(graph: Graph, epilogues: bool = True) -> Plan:
    """Partition a graph: its GEMM programs, finalizes and leftovers in order. Without ``epilogues`` every GEMM is bare
    and each chain between two GEMMs is one leftover: ideal per-boundary fusion, to compare with."""
    assignment = assign(graph, epilogues)
    names = _Names(graph, assignment)
    steps = [_step(d, names, assignment.schedule) for d in assignment.drafts]
    outputs = []
    for name, n in own_roots(graph):
        stored = stored_root(n)
        rows = None if stored is n else (int(str(n.attrs[0])), int(str(n.attrs[1])))
        outputs.append((name, View(names.buffer(Slot(stored)), rows)))
    partials = {b for s in steps for b, p in zip(s.stores, partial_outputs(s.program), strict=True) if p}
    inputs = tuple(str(n.attrs[0]) for n in graph.inputs)
    plan = Plan(inputs, tuple(outputs), tuple(steps), names.types, frozenset(partials))
    if settings.verify_ir():
        verify_plan(plan)
    return plan


def _step(d: Draft, names: _Names, schedule: Schedule) -> Step:
    params = {n: names.param(slot) for n, slot in d.reads.items()}
    mapping = dict(params)
    if d.gemm is not None:
        mapping[d.gemm] = input_("acc", d.gemm.type)
    bodies = substitute([names.stored(s) for s in d.writes], mapping)
    outputs = tuple(zip((names.buffer(s) for s in d.writes), bodies, strict=True))
    accumulator = (mapping[d.gemm],) if d.gemm is not None else ()
    a: str = ""
    b: tuple[str, ...] = ()
    gemm: Gemm | None = None
    if d.gemm is not None:
        left, *right = operands(d.gemm)
        a, b = names.buffer(Slot(left)), tuple(names.buffer(Slot(w)) for w in right)
        k = left.type.rows if d.gemm.attrs[0] == "tn" else left.type.cols
        gemm = Gemm(str(d.gemm.attrs[0]), k if k is not None else 0, left.type.dtype)
    role: Role = "epilogue" if d.gemm is not None else "finalize" if d.is_finalize else "leftover"
    unique = tuple(dict.fromkeys(params.values()))
    program = Program(names.step(d), role, (*accumulator, *unique), outputs, gemm)
    tiles = [n for n in d.reads if n.type.kind is Kind.TILE]
    on_weights = role == "leftover" and bool(tiles) and all(isinstance(n.type.rows, int) for n in tiles)
    reason = _reason(d, schedule) if role == "leftover" and not on_weights else ""
    loads = tuple(dict.fromkeys(names.buffer(s) for s in d.reads.values()))
    return Step(program, a, b, loads, tuple(names.buffer(s) for s in d.writes), reason, on_weights)


def _reason(d: Draft, schedule: Schedule) -> str:
    """Why a leftover is one."""
    for n in d.computed:
        if n in schedule.left:
            return schedule.left[n]
    if d.time[0] == 0:
        reads = (s.node for s in d.reads.values() if s.node.op is ops.INPUT and s.node.type.kind is Kind.TILE)
        names = sorted({str(n.attrs[0]) for n in reads})
        gradients = [n for n in names if n.startswith("d_")]
        given = ", ".join(gradients or names) or "its operands"
        return f"no GEMM here produces {given}: what comes from outside is read in one pass"
    gemm = schedule.order[d.time[0] - 1]
    needs = sorted({str(n) for n in d.computed if schedule.time[n] == d.time and n.type.kind is not Kind.TILE})
    what = f"needs {needs[0]}, " if needs else "needs "
    return f"{what}a statistic of the whole output of the GEMM {gemm} before it, and no later GEMM takes the result up"


class _Names:
    """Readable, unique, and the same for the same structure."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.types: dict[str, Type] = {str(n.attrs[0]): n.type for n in graph.inputs}
        self.storage = storage_dtypes(graph.roots)
        # asked for as they are: by whoever gets the output, a GEMM that takes this dtype, a comparison
        self.exact = {stored_root(n) for _, n in own_roots(graph)} | compared(assignment.schedule.time)
        self.exact.update(a for gemm in assignment.schedule.order for a in gemm.args)
        self.buffers: dict[Slot, str] = {Slot(n): str(n.attrs[0]) for n in graph.inputs}
        self.steps: set[str] = set()
        self.wanted = {stored_root(n): name for name, n in reversed(own_roots(graph)) if stored_root(n) is n}
        for d in assignment.drafts:
            for slot in d.writes:
                self._name(slot)

    def _name(self, slot: Slot) -> None:
        n = slot.node
        base = self.wanted.get(n, "") if not slot.partial else ""
        if not base:
            inner = n.args[0] if n.op is ops.CAST else n
            base = {"reduce": f"{inner.attrs[0]}s" if inner.op is ops.REDUCE else "lse"}.get(inner.op.family, "")
            base = base or {Kind.TILE: "t", Kind.COLVEC: "c", Kind.ROWVEC: "v"}.get(n.type.kind, "s")
        name, k = (base, 1) if base not in self.types and base not in LANGUAGE else (f"{base}1", 1)
        while name in self.types:
            k += 1
            name = f"{base}{k}"
        self.types[name] = self.stored(slot).type
        self.buffers[slot] = name

    def buffer(self, slot: Slot) -> str:
        """The buffer of a slot."""
        if slot not in self.buffers:
            raise PlanError(f"nothing writes {slot.node}")
        return self.buffers[slot]

    def stored(self, slot: Slot) -> Node:
        """The value as it is written: a Tile between steps in its storage dtype, everything else as it is."""
        n = slot.node
        return n if n in self.exact else cast(n, self.storage.get(n, n.type.dtype))

    def param(self, slot: Slot) -> Node:
        """The parameter that stands for a slot in a program."""
        name = self.buffer(slot)
        return input_(safe_name(name), self.types[name])

    def step(self, d: Draft) -> str:
        """A name for a step: after the weight of its GEMM, or the step that it follows."""
        if d.gemm is not None:
            form = d.gemm.attrs[0]
            weights = operands(d.gemm)[1:] if form != "tn" else [operands(d.gemm)[1]]
            parts = [_short(self.buffer(Slot(w))) for w in weights]
            base = "_".join(dict.fromkeys(parts)) + {"nt": "", "nn": "_dgrad", "tn": "_wgrad"}[str(form)]
        else:
            base = f"{'finalize' if d.is_finalize else 'leftover'}_{'_'.join(self.buffer(s) for s in d.writes[:2])}"
        name, k = safe_name(base), 1
        while name in self.steps:
            k += 1
            name = f"{safe_name(base)}_{k}"
        self.steps.add(name)
        return name


def _short(name: str) -> str:
    return re.sub(r"_?weight$", "", name) or name


def safe_name(name: str) -> str:
    """An identifier that shadows nothing of the language."""
    name = re.sub(r"\W", "_", name)
    if name[:1].isdigit() or not name:
        name = f"_{name}"
    return f"{name}_" if iskeyword(name) or name in LANGUAGE or name in ("acc", "dict") else name
