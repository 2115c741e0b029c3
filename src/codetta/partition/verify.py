"""What must hold of every plan: each buffer is written once before it is read, by programs of matching types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from codetta.core.types import Dim, Kind, Type, compute_dtype
from codetta.errors import PlanError
from codetta.ir import legal
from codetta.ir.program import Gemm
from codetta.ir.verify import unique
from codetta.partition.plan import Plan, Step, partial_outputs


def verify_plan(plan: Plan) -> None:
    """Raise PlanError unless every step finds what it reads, and somebody needs what it writes."""
    unique("inputs", plan.inputs)
    unique("outputs", (name for name, _ in plan.outputs))
    unique("steps", (s.program.name for s in plan.steps))
    written = set(plan.inputs)
    for s in plan.steps:
        where = f"{s.program.name}: "
        for name in (*_operands(s), *s.loads):
            _expect(name in written, f"{where}reads {name} before it is written")
        for name in s.stores:
            _expect(name not in written, f"{where}writes {name} again")
            written.add(name)
        _verify_types(plan, s, where)
        _verify_partials(plan, s, where)
        acc = s.program.params[0] if s.program.role == "epilogue" else None
        found = legal.why_not(s.program.role, [n for _, n in s.program.outputs], acc)
        _expect(found is None, f"{where}{found and found.reason}")
    _verify_outputs(plan, written)


def verify_passage(
    forward: Plan, backward: Plan, saved: Iterable[tuple[str, str]], cotangents: Mapping[str, Type]
) -> None:
    """Raise PlanError unless backward reads nothing but what it is given, as it is: forward's inputs, kept values (by
    their names among backward's inputs and forward's outputs), cotangents."""
    views = dict(forward.outputs)
    given = {**{n: forward.buffers[n] for n in forward.inputs}, **cotangents}
    for name, output in saved:
        _expect(output in views, f"forward has no output {output} to keep as {name}")
        given[name] = forward.buffers[views[output].buffer]
    for name in backward.inputs:
        _expect(given.get(name) == backward.buffers[name], f"backward reads {name}, which it is not given as it is")


def _verify_outputs(plan: Plan, written: set[str]) -> None:
    for name, view in plan.outputs:
        _expect(view.buffer in written - set(plan.inputs), f"no step writes the output {name}")
        _expect(view.buffer not in plan.partials, f"the output {name} is in parts")
        rows = plan.buffers[view.buffer].rows
        inside = view.rows is None or (isinstance(rows, int) and 0 <= view.rows[0] < view.rows[1] <= rows)
        _expect(inside, f"the output {name} is rows {view.rows} of {rows}")
    read = {name for s in plan.steps for name in (*_operands(s), *s.loads)} | {v.buffer for _, v in plan.outputs}
    idle = written - read - set(plan.inputs)
    _expect(not idle, f"nobody reads {sorted(idle)}")


def _verify_types(plan: Plan, s: Step, where: str) -> None:
    params = s.program.params[1:] if s.program.role == "epilogue" else s.program.params
    _expect(len(params) == len(s.loads), f"{where}{len(s.loads)} buffers for {len(params)} parameters")
    outputs = [n for _, n in s.program.outputs]
    _expect(len(outputs) == len(s.stores), f"{where}{len(s.stores)} buffers for {len(outputs)} outputs")
    for node, name in (*zip(params, s.loads, strict=True), *zip(outputs, s.stores, strict=True)):
        _expect(node.type == plan.buffers[name], f"{where}{node} is bound to {name}, a {plan.buffers[name]}")
    if s.program.gemm is not None:
        a, b = plan.buffers[s.a], [plan.buffers[name] for name in s.b]
        expected = gemm_type(s.program.gemm, a, b)
        _expect(expected == s.program.params[0].type, f"{where}the GEMM of {a} and {b} is no {s.program.params[0]}")


def gemm_type(gemm: Gemm, a: Type, b: Iterable[Type]) -> Type | None:
    """The accumulator of a GEMM of these operands, stacked ones in order; None if they do not fit the GEMM."""
    b = list(b)
    rows = [t.rows for t in b if isinstance(t.rows, int)]
    stacked: Dim | None = sum(rows) if len(rows) == len(b) else b[0].rows if len(b) == 1 else None
    inner = {"nt": (a.cols, b[0].cols), "nn": (a.cols, stacked), "tn": (a.rows, stacked)}[gemm.form]
    fits = {t.kind for t in (a, *b)} == {Kind.TILE} and {t.dtype for t in (a, *b)} == {gemm.dtype}
    if not fits or len({t.cols for t in b}) > 1 or inner != (gemm.k, gemm.k):
        return None
    cols = stacked if gemm.form == "nt" else b[0].cols
    return Type(Kind.TILE, compute_dtype(gemm.dtype), a.cols if gemm.form == "tn" else a.rows, cols)


def _verify_partials(plan: Plan, s: Step, where: str) -> None:
    for name, partial in zip(s.stores, partial_outputs(s.program), strict=True):
        _expect((name in plan.partials) == partial, f"{where}writes {name} {'in parts' if partial else 'whole'}")
    for name in (*_operands(s), *s.loads):
        folds = s.program.role == "finalize" and name in s.loads
        _expect(folds or name not in plan.partials, f"{where}reads {name}, which is in parts")


def _operands(s: Step) -> tuple[str, ...]:
    return (s.a, *s.b) if s.program.gemm is not None else ()


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise PlanError(problem)
