"""The ten programs of the CODA paper, written in the language and compiled by the backend, each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from codetta.backends import prepare
from codetta.backends.reference.evaluate import TORCH
from codetta.bench.kernels import Settings, measured, told
from codetta.bench.report import OURS, Report, Row
from codetta.bench.shapes import Shape, rope_tables
from codetta.bench.steps import Case, case_of
from codetta.core.types import Dim, Type, bf16, f32, i64, tile
from codetta.ir.program import Program, is_partial, param_name
from codetta.lang.annotations import ColVec, RowVec, Table, Tile, Value
from codetta.lang.functions import (
    halves,
    join_halves,
    logsumexp_row,
    select_column,
    sigmoid,
    silu,
    sum_row,
    to,
)
from codetta.lang.sizes import with_sizes
from codetta.lang.trace import Epilogue, epilogue
from codetta.partition.plan import Plan, Step, View

Outputs = dict[str, Value]
Bf16Tile = Annotated[Tile, bf16]


# --- the programs -----------------------------------------------------------------------------------------------------


def residual_rms(s: Shape) -> Epilogue:
    """The residual stream, the next input without its row scale, the partial sums of squares."""

    @epilogue(name="residual_rms", gemm="nt", k="K", dtype=bf16)
    def program(acc: Tile, residual: Bf16Tile, gain: Annotated[RowVec, bf16]) -> Outputs:
        x = acc + residual
        return dict(x=to(x, bf16), h=to(x * gain, bf16), ssq=sum_row(x * x))

    return program


def rms_scale(s: Shape) -> Epilogue:
    """A norm's row scale behind its GEMM."""

    @epilogue(name="rms_scale", gemm="nt", k="K", dtype=bf16)
    def program(acc: Tile, rstd: ColVec) -> Outputs:
        return dict(y=to(acc * rstd, bf16))

    return program


def swiglu(s: Shape) -> Epilogue:
    """SwiGLU of gate | up, which are kept."""

    @epilogue(name="swiglu", gemm="nt", k="K", dtype=bf16)
    def program(acc: Tile) -> Outputs:
        gate, up = halves(acc)
        return dict(z=to(acc, bf16), y=to(silu(gate) * up, bf16))

    return program


def rms_swiglu(s: Shape) -> Epilogue:
    """The same behind a norm."""

    @epilogue(name="rms_swiglu", gemm="nt", k="K", dtype=bf16)
    def program(acc: Tile, rstd: ColVec) -> Outputs:
        z = acc * rstd
        gate, up = halves(z)
        return dict(z=to(z, bf16), y=to(silu(gate) * up, bf16))

    return program


def rope(s: Shape) -> Epilogue:
    """The halves of each head turned."""

    @epilogue(name="rope", gemm="nt", k="K", dtype=bf16)
    def program(acc: Tile, cos: Annotated[Table, bf16], sin: Annotated[Table, bf16]) -> Outputs:
        return dict(q=to(_turned(acc, cos, sin, s.heads), bf16))

    return program


def rms_rope(s: Shape) -> Epilogue:
    """The same behind a norm."""

    @epilogue(name="rms_rope", gemm="nt", k="K", dtype=bf16)
    def program(acc: Tile, rstd: ColVec, cos: Annotated[Table, bf16], sin: Annotated[Table, bf16]) -> Outputs:
        return dict(q=to(_turned(acc * rstd, cos, sin, s.heads), bf16))

    return program


def _turned(x: Any, cos: Any, sin: Any, heads: int) -> Value:
    a, b = halves(x, groups=heads)
    (ca, cb), (sa, sb) = halves(cos), halves(sin)
    return join_halves(a * ca - b * sa, b * cb + a * sb, groups=heads)


def cross_entropy(s: Shape) -> Epilogue:
    """The logits, their log-sum-exp, and the target's."""

    @epilogue(name="cross_entropy", gemm="nt", k="K", dtype=bf16)
    def program(acc: Tile, target: Annotated[ColVec, i64]) -> Outputs:
        return dict(logits=to(acc, bf16), lse=logsumexp_row(acc), picked=select_column(acc, target))

    return program


def rms_cross_entropy(s: Shape) -> Epilogue:
    """The same behind a norm."""

    @epilogue(name="rms_cross_entropy", gemm="nt", k="K", dtype=bf16)
    def program(acc: Tile, rstd: ColVec, target: Annotated[ColVec, i64]) -> Outputs:
        logits = acc * rstd
        return dict(logits=to(logits, bf16), lse=logsumexp_row(logits), picked=select_column(logits, target))

    return program


def residual_rms_backward(s: Shape) -> Epilogue:
    """The stream's gradient before its row's correction, and the inner product that the correction needs."""

    @epilogue(name="residual_rms_backward", gemm="nn", k="K", dtype=bf16)
    def program(acc: Tile, x: Bf16Tile, gain: Annotated[RowVec, bf16], incoming: Bf16Tile) -> Outputs:
        g = acc * gain
        return dict(dx=to(g + incoming, bf16), inner=sum_row(g * x))

    return program


def swiglu_backward(s: Shape) -> Epilogue:
    """The gradient of gate | up, the activation again, and the row's inner product."""

    @epilogue(name="swiglu_backward", gemm="nn", k="K", dtype=bf16)
    def program(acc: Tile, z: Annotated[Tile, "2*N", bf16]) -> Outputs:
        gate, up = halves(z)
        s = sigmoid(gate)
        dgate, dup = acc * up * s * (1.0 + gate * (1.0 - s)), acc * silu(gate)
        inner = sum_row(dgate * gate + dup * up)
        return dict(dz=to(join_halves(dgate, dup), bf16), y=to(silu(gate) * up, bf16), inner=inner)

    return program


@dataclass(frozen=True)
class Entry:
    """A program, the columns of its GEMM and its inner size, and the kind that ``plain`` knows it by."""

    name: str
    write: Callable[[Shape], Epilogue]
    columns: Callable[[Shape], int]
    inner: Callable[[Shape], int]
    role: str


def _d(s: Shape) -> int:
    return s.d


def _heads(s: Shape) -> int:
    return s.heads * s.head


def _two_ffn(s: Shape) -> int:
    return 2 * s.ffn


def _ffn(s: Shape) -> int:
    return s.ffn


def _vocabulary(s: Shape) -> int:
    return s.vocabulary


PROGRAMS = (
    Entry("GEMM + RoPE", rope, _heads, _d, "RoPE"),
    Entry("GEMM + SwiGLU", swiglu, _two_ffn, _d, "SwiGLU"),
    Entry("GEMM + cross-entropy", cross_entropy, _vocabulary, _d, "log-sum-exp"),
    Entry("GEMM + residual + partial RMS", residual_rms, _d, _ffn, "residual, partial RMS"),
    Entry("GEMM + RMS scale", rms_scale, _d, _d, "RMS scale"),
    Entry("RMS + GEMM + SwiGLU", rms_swiglu, _two_ffn, _d, "SwiGLU"),
    Entry("RMS + GEMM + RoPE", rms_rope, _heads, _d, "RoPE"),
    Entry("RMS + GEMM + cross-entropy", rms_cross_entropy, _vocabulary, _d, "log-sum-exp"),
    Entry("residual + partial RMS backward", residual_rms_backward, _d, _two_ffn, "residual, partial RMS backward"),
    Entry("SwiGLU backward", swiglu_backward, _ffn, _d, "SwiGLU backward"),
)


# --- from a program to a case -----------------------------------------------------------------------------------------


def paper(shapes: Iterable[Shape], settings: Settings, report: Report, backend: str) -> None:
    """Measure the ten programs at each shape."""
    for s in shapes:
        wanted = [e for e in PROGRAMS if settings.wants(e.name)]
        plans = {e.name: plan_of(bound(e, s)) for e in wanted}
        try:
            prepare(backend, plans.values())()
        except Exception as error:  # told; each program is tried by itself all the same
            report.add(Row("paper", s.name, s.tokens, "compiling", OURS, note=told(error)))
        for e in wanted:
            if not report.has_time(f"{s.name} {e.name}"):
                continue
            settings.tell(f"{s.name} {e.name}")
            try:
                report.add(*measured(case(e, s, plans[e.name], settings.device, backend), s, settings, "paper"))
            except Exception as error:  # told, and the next is measured
                report.add(Row("paper", s.name, s.tokens, e.name, OURS, note=told(error)))
        torch._dynamo.reset()


def bound(entry: Entry, s: Shape) -> Program:
    """The program at a shape's sizes."""
    program = entry.write(s).program
    sizes = {"N": entry.columns(s), "K": entry.inner(s)}
    return with_sizes(program, sizes | ({"I": s.head} if entry.role == "RoPE" else {}))


def plan_of(program: Program) -> Plan:
    """A hand-written program as a plan of one step; buffers have the names of parameters and outputs."""
    gemm, acc = program.gemm, program.params[0].type
    if gemm is None or acc.cols is None:
        raise TypeError(f"{program.name} is bound to no GEMM")
    loads = tuple(param_name(p) for p in program.params[1:])
    outputs = tuple(name for name, _ in program.outputs)
    shape: tuple[Dim, Dim] = (acc.cols, gemm.k) if gemm.form == "nt" else (gemm.k, acc.cols)
    buffers: dict[str, Type] = {"a": tile(gemm.k, bf16), "w": tile(shape[1], bf16, rows=shape[0])}
    buffers |= {param_name(p): p.type for p in program.params[1:]}
    buffers |= {name: n.type for name, n in program.outputs}
    partials = frozenset(name for name, n in program.outputs if is_partial(n))
    step = Step(program, "a", ("w",), loads, outputs)
    return Plan(("a", "w", *loads), tuple((n, View(n)) for n in outputs), (step,), buffers, partials)


def case(entry: Entry, s: Shape, plan: Plan, device: str, backend: str) -> Case:
    """The program with random operands."""
    memory = dict(_operands(plan, s, device))
    roles: dict[str, Any] = {n: memory[n] for n in plan.steps[0].loads}
    if entry.role == "RoPE":
        roles["widths"] = (s.heads * s.head,)
    found = case_of(plan, plan.steps[0], memory, s.tokens, backend, entry.name)
    return replace(found, role=entry.role, roles=roles)


def _operands(plan: Plan, s: Shape, device: str) -> Iterator[tuple[str, Tensor]]:
    """Random numbers of the size that they have in a model: activations of one, row scales around one."""
    generator = torch.Generator(device).manual_seed(0)
    tables: Mapping[str, Tensor] = rope_tables(s.tokens, s.head, device)
    for name in plan.inputs:
        t = plan.buffers[name]
        shape = [s.tokens if not isinstance(d, int) else d for d in (t.rows, t.cols) if d is not None]
        if name in tables:
            yield name, tables[name]
        elif name == "target":
            yield name, torch.randint(s.vocabulary, shape, generator=generator, device=device, dtype=TORCH[t.dtype])
        else:
            x = torch.randn(shape, generator=generator, device=device)
            x = x * shape[1 if plan.steps[0].program.gemm.form == "nt" else 0] ** -0.5 if name == "w" else x  # type: ignore[union-attr]
            x = 1.0 + 0.3 * x.clamp(-2, 2) if name in ("rstd", "gain") else x
            yield name, x if t.dtype == f32 else x.to(torch.bfloat16)
