"""Row kernels in Triton's interpreter, held against the reference backend: random programs, random values."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from codetta.backends.hopper import memory
from codetta.backends.hopper.rows import compile_rows
from codetta.backends.reference.evaluate import TORCH
from codetta.backends.reference.execute import compile_body
from codetta.backends.reference.tiles import fold
from codetta.core.node import Node
from codetta.core.types import ROWS, Kind, Type, boolean, colvec, f64, groupvec, i64, rowvec, scalar, table, tile
from codetta.errors import CodettaError
from codetta.ir import build, legal, ops, split
from codetta.ir.program import Program
from codetta.ir.split import Split
from codetta.partition.plan import partial_outputs
from codetta.partition.size import dim

_CONVERT, _PATCH = interpreter._convert_float, interpreter._patch_lang_tensor


def to_nearest(x: np.ndarray, source: tl.dtype, to: tl.dtype, mode: object) -> np.ndarray:
    """The interpreter's conversion of floats, float32 to bfloat16 rounded to nearest even as every GPU does; the
    interpreter cuts the bits off."""
    if (source, to) != (tl.float32, tl.bfloat16):
        return _CONVERT(x, source, to, mode)
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16).reshape(x.shape)


def dot(builder: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *how: object) -> TensorHandle:
    """A product of bfloat16 as of the numbers that they are; the interpreter multiplies their bits."""
    wide = [
        (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b)
    ]
    return TensorHandle(np.matmul(*wide, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def patched(tensor: type, scope: object) -> None:
    """The interpreter's tensors as bounds of ``range``: Triton 3.6 asks numpy for what numpy 2.4 no longer does."""
    _PATCH(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """The interpreter with what is patched above, and outputs that are poisoned."""
    patch.setattr(memory, "empty", poisoned)
    patch.setattr(interpreter, "_convert_float", to_nearest)
    patch.setattr(interpreter, "_patch_lang_tensor", patched)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory in which a forgotten store is seen."""
    t = torch.empty(tuple(shape), dtype=dtype, device=device)
    return t.fill_(torch.nan if dtype.is_floating_point else True if dtype == torch.bool else -7777)


def random_value(t: Type, rows: int, rng: torch.Generator) -> Tensor:
    """A tensor of that type; integers reach below 0 and beyond small column counts."""
    shape = [dim(s, rows) for s in (t.rows, t.cols) if s is not None]
    if t.dtype is boolean:
        return torch.rand(shape, generator=rng) < 0.5
    if not t.dtype.is_float:
        return torch.randint(-3, 12, shape, generator=rng, dtype=TORCH[t.dtype])
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(TORCH[t.dtype])


def run(
    program: Program, params: list[Tensor], rows: int, partial: Mapping[str, Node] | None = None
) -> dict[str, Tensor]:
    """The outputs by name, parts folded."""
    with np.errstate(all="ignore"):  # what numpy warns of, a GPU computes silently
        found = compile_rows(program, partial or {})(params, rows)
    marks = partial_outputs(program)
    return {
        name: fold(n, t) if in_parts else t
        for (name, n), t, in_parts in zip(program.outputs, found, marks, strict=True)
    }


def expect_reference(program: Program, rows: int, tolerance: float, seed: int = 0) -> None:
    """The kernels give what the reference backend gives, in shape, dtype and value."""
    rng = torch.Generator().manual_seed(seed)
    params = [random_value(p.type, rows, rng) for p in program.params]
    before = [p.clone() for p in params]
    got = run(program, params, rows)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    want = compile_body(program)(params, rows)
    for (name, n), b, in_parts in zip(program.outputs, want, partial_outputs(program), strict=True):
        expect_close(name, got[name], fold(n, b) if in_parts else b, tolerance)


def expect_close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Equal shapes, dtypes and non-finite places; the rest within a share of the largest value."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    a, b = got.double(), want.double()
    special = ~b.isfinite()
    assert torch.equal(a[special].nan_to_num(), b[special].nan_to_num()), name
    error = (a - b)[~special].abs()
    assert a[~special].isfinite().all(), name
    if error.numel():
        assert error.max() <= tolerance * max(b[~special].abs().max().item(), 1e-3), (name, error.max())


# --- random programs --------------------------------------------------------------------------------------------------

UNARY = (ops.NEG, ops.ABS, ops.TANH, ops.SIGMOID, ops.SILU, ops.GELU, ops.GELU_TANH, ops.SIN, ops.COS, ops.ERF)
BINARY = (ops.ADD, ops.SUB, ops.MUL, ops.ADD, ops.MUL, ops.MAXIMUM, ops.MINIMUM)
COMPARE = (ops.LT, ops.LE, ops.GT, ops.GE, ops.EQ, ops.NE)
SPLITS = (
    *(split.halves(g) for g in (1, 2, 4)),
    split.ADJACENT,
    *(Split(g, n) for g in (1, 2) for n in (3, 2)),
    *(split.columns(*sizes, groups=g) for sizes in ((12, 6, 6), (4, 8), (2, 4, 6), (10, 14)) for g in (1, 2)),
)


def random_program(rng: Random, role: str) -> Program:
    """A program of float64 values and integers, over tame numbers."""
    cols, groups = rng.choice([24, 24, 12, 48]), rng.choice([1, 2, 4])
    shapes = [rowvec(cols), colvec(), scalar()]
    if role != "finalize":
        shapes += [tile(cols), tile(cols), tile(cols), groupvec(groups), table(cols // groups)]
    params = [build.input_(f"p{i}", rng.choice(shapes).of(f64)) for i in range(rng.randint(1, 4))]
    params.append(build.input_("index", colvec(i64)))
    if role == "epilogue":
        params.insert(0, build.input_("acc", tile(cols, f64)))
    pool = list(params)
    for _ in range(rng.randint(2, 16)):
        try:
            pool.append(_step(rng, pool))
        except CodettaError:
            continue
    acc = pool[0] if role == "epilogue" else None
    outputs: dict[str, Node] = {}
    for n in [*reversed(pool[-4:]), *rng.choices(pool, k=2)]:
        if legal.why_not(role, [*outputs.values(), n], acc) is None:
            outputs.setdefault(f"out{len(outputs)}", n)
    outputs = outputs or {"out": params[0]}
    return Program("random", role, tuple(params), tuple(outputs.items()))  # type: ignore[arg-type]


def _step(rng: Random, pool: list[Node]) -> Node:
    x, y = (rng.choice(pool[-4:] if rng.random() < 0.6 else pool) for _ in range(2))
    match rng.randrange(12):
        case 0 | 1:
            return build.apply(rng.choice(UNARY), build.cast(x, f64))
        case 2 | 3 | 4:
            return build.apply(rng.choice(BINARY), build.cast(x, f64), rng.choice([y, y, 0.5, -2.0]))
        case 5:
            return build.where(build.apply(rng.choice(COMPARE), x, y), build.cast(x, f64), rng.choice([y, 0.25]))
        case 6 | 7:
            how = rng.choice(SPLITS)
            pool.extend(build.parts(x, how)[1:])
            return build.part(x, how, 0)
        case 8:
            how = rng.choice(SPLITS)
            lanes = build.parts(x, how)
            return build.join(
                how,
                *(rng.choice([p, build.apply(ops.SILU, build.cast(p, f64)), rng.choice(lanes), 0.0]) for p in lanes),
            )
        case 9 | 10:
            return _reduction(rng, x)
    cols = x.type.cols if isinstance(x.type.cols, int) else 24
    return rng.choice(
        [
            build.column(cols),
            build.logsumexp_row(x),
            build.select_column(x, pool[0] if pool[0].type.dtype is i64 else build.input_("index", colvec(i64))),
            build.expand(x, tile(cols)),
            build.cast(build.apply(ops.RANDOM, 7, build.row(ROWS), build.column(cols)), f64),
        ]
    )


def _reduction(rng: Random, x: Node) -> Node:
    fn = rng.choice(["sum", "sum", "max", "absmax"])
    to = rng.choice([Kind.COLVEC, Kind.ROWVEC, Kind.SCALAR, Kind.GROUPVEC, Kind.TABLE])
    return build.reduce(x, fn, to, rng.choice([1, 2, 4]))
