"""A decorated function becomes a Program whose nodes know the user's lines."""

from typing import Annotated

import numpy as np
import pytest

from codetta.core.types import ROWS, Sym, Type, bf16, boolean, colvec, f32, groupvec, i64, rowvec, scalar, table, tile
from codetta.errors import CodettaError
from codetta.ir import build, ops
from codetta.ir.program import Gemm, Program
from codetta.lang import functions as fn
from codetta.lang.annotations import ColVec, GroupVec, RowVec, Scalar, Table, Tile, Value, wrap
from codetta.lang.trace import Epilogue, epilogue, finalize, leftover

N = Sym("N")


def test_the_example_of_the_design():
    @epilogue
    def residual_rms(acc: Tile, residual: Tile, gain: RowVec):
        """Doc."""
        x = acc + residual
        return dict(x=x, h=x * gain, ssq=fn.sum_row(x * x))

    acc, residual, gain = (build.input_(*p) for p in (("acc", tile(N)), ("residual", tile(N)), ("gain", rowvec(N))))
    x = build.add(acc, residual)
    outputs = (("x", x), ("h", build.mul(x, gain)), ("ssq", build.sum_row(build.mul(x, x))))
    assert residual_rms.program == Program("residual_rms", "epilogue", (acc, residual, gain), outputs)
    assert residual_rms.__doc__ == "Doc."
    assert str(residual_rms).splitlines() == [
        "@epilogue",
        'def residual_rms(acc: Tile["N", f32], residual: Tile["N", f32], gain: RowVec["N", f32]):',
        "    x = acc + residual",
        "    return dict(x=x, h=x * gain, ssq=sum_row(x * x))",
    ]


@pytest.mark.parametrize(
    "annotation, expected",
    [
        (Tile, tile(N)),
        (Tile[bf16], tile(N, bf16)),
        (Tile[4096], tile(4096)),
        (Tile[4096, bf16], tile(4096, bf16)),
        (Tile["2*N"], tile(Sym("N", 2 * Sym("N").scale))),
        (Tile["N / 2", bf16], tile(Sym("N", Sym("N").scale / 2), bf16)),
        (Tile[14336, 4096, f32], tile(4096, f32, 14336)),
        (Tile["T", 4096], tile(4096, f32, Sym("T"))),
        (RowVec, rowvec(N)),
        (RowVec[4096, bf16], rowvec(4096, bf16)),
        (ColVec, colvec()),
        (ColVec[i64], colvec(i64)),
        (ColVec[64, f32], colvec(f32, 64)),
        (GroupVec[32, bf16], groupvec(32, bf16)),
        (GroupVec[8, 32, bf16], groupvec(32, bf16, 8)),
        (GroupVec, groupvec(Sym("G"))),
        (Table[64, bf16], table(64, bf16)),
        (Table, table(Sym("I"))),
        (Scalar, scalar()),
        (Scalar[i64], scalar(i64)),
        (Annotated[Tile, 4096, bf16], tile(4096, bf16)),
        (Annotated[RowVec, "2*N"], rowvec(Sym("N", 2 * Sym("N").scale))),
        ("Tile[4096, bf16]", tile(4096, bf16)),
    ],
    ids=str,
)
def test_annotations(annotation: object, expected: Type):
    def f(acc: Tile[64], x):
        return x + 0

    f.__annotations__["x"] = annotation
    assert epilogue(f).program.params[1].type == expected


def test_text_annotations_see_the_names_around_the_function():
    WIDTH = 4096

    def f(acc: "Tile[WIDTH, bf16]"):
        return acc

    assert epilogue(f).program.params[0].type == tile(4096, bf16)


def test_roles_and_options():
    @epilogue(gemm="nt", k=4096, dtype=bf16, name="o_proj.0")
    def o_proj(acc: Tile[64]):
        return acc

    @finalize
    def rstd(ssq: ColVec):
        return fn.rsqrt(ssq / 64.0 + 1e-6)

    @leftover(name="first norm")
    def norm(x: Tile):
        return x * fn.rsqrt(fn.sum_row(x * x))

    assert (o_proj.program.name, o_proj.program.gemm) == ("o_proj.0", Gemm("nt", 4096, bf16))
    assert [e.program.role for e in (o_proj, rstd, norm)] == ["epilogue", "finalize", "leftover"]
    assert norm.program.name == "first norm"
    assert [name for name, _ in rstd.program.outputs] == ["out"]
    assert isinstance(norm, Epilogue)


X, V, IDX, B = (
    wrap(build.input_(*p)) for p in [("x", tile(N)), ("v", rowvec(N)), ("i", colvec(i64)), ("b", tile(N, boolean))]
)


@pytest.mark.parametrize(
    "value, op, args",
    [
        (X + V, ops.ADD, (X, V)),
        (1 + X, ops.ADD, (1, X)),
        (X - 1.0, ops.SUB, (X, 1.0)),
        (1 - X, ops.SUB, (1, X)),
        (X * 2, ops.MUL, (X, 2)),
        (2 * X, ops.MUL, (2, X)),
        (X / 2, ops.DIV, (X, 2)),
        (2 / X, ops.DIV, (2, X)),
        (IDX // 2, ops.FLOORDIV, (IDX, 2)),
        (IDX % 2, ops.MOD, (IDX, 2)),
        (7 % IDX, ops.MOD, (7, IDX)),
        (-X, ops.NEG, (X,)),
        (abs(X), ops.ABS, (X,)),
        (X**2, ops.MUL, (X, X)),
        (X**-1, ops.RECIP, (X,)),
        (X**0.5, ops.SQRT, (X,)),
        (X**-0.5, ops.RSQRT, (X,)),
        (X == V, ops.EQ, (X, V)),
        (X != 1, ops.NE, (X, 1)),
        (X < 1, ops.LT, (X, 1)),
        (1 < X, ops.GT, (X, 1)),  # noqa: SIM300
        (X <= V, ops.LE, (X, V)),
        (X >= V, ops.GE, (X, V)),
        (B & True, ops.AND, (B, True)),
        (False | B, ops.OR, (False, B)),
        (~B, ops.NOT, (B,)),
        (np.float32(2) * X, ops.MUL, (2.0, X)),
        (X * np.int64(2), ops.MUL, (X, 2)),
    ],
    ids=lambda v: repr(v) if isinstance(v, Value) else None,
)
def test_operators(value: Value, op: ops.Op, args: tuple[object, ...]):
    nodes = tuple(a.node if isinstance(a, Value) else build.const(a) for a in args)
    assert value.node is build.node(op, *nodes)


def test_every_op_has_a_form_in_the_language():
    unsaid = {op.name for op in ops.OPS.values()} - {op.name for op in fn.FORMS}
    assert unsaid == {"input", "matmul"}  # a parameter, and what precedes an epilogue
    assert all(f.__doc__ for f in fn.LANGUAGE.values())


def test_the_kind_of_a_value_is_its_class():
    assert isinstance(X * V, Tile)
    assert isinstance(fn.sum_row(X), ColVec)
    assert isinstance(fn.sum_inside(X, groups=4), GroupVec)
    assert isinstance(fn.sum_groups(X, groups=4), Table)
    assert isinstance(fn.sum_all(V), Scalar)
    assert isinstance(fn.column_index(X), RowVec)
    assert isinstance(fn.row_index(X), ColVec)


def test_indices_are_sized_like_their_value():
    assert fn.column_index(X).node is build.column(N)
    assert fn.row_index(X).node is build.row(ROWS)
    with pytest.raises(CodettaError, match="no cols to count"):
        fn.column_index(IDX)


def test_parts_come_together_again():
    y = wrap(build.input_("y", tile(64)))
    a, b, c = fn.columns(y, 32, 16, 16)
    assert [p.node.type for p in (a, b, c)] == [tile(32), tile(16), tile(16)]
    assert fn.join_columns(a, b, c).node.attrs == a.node.attrs[:1]
    assert fn.join_columns(a, 0, c, sizes=(32, 16, 16)).node.attrs == a.node.attrs[:1]
    assert fn.join_columns(*fn.equal_columns(y, 4)).node.attrs == fn.equal_columns(y, 4)[0].node.attrs[:1]
    assert fn.join_halves(*fn.halves(y, groups=4), groups=4).node.type == tile(64)


def test_nodes_remember_the_line_that_made_them():
    @epilogue
    def f(acc: Tile[123]):
        y = acc * 123.0
        return dict(y=y)

    where = f.program.outputs[0][1].where
    assert where is not None
    assert where.file == __file__
    assert where.text == "y = acc * 123.0"
    assert where.line == f.fn.__code__.co_firstlineno + 2
