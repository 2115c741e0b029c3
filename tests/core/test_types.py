"""Types: which sizes a kind has, how kinds broadcast, sizes that are symbols."""

from fractions import Fraction

import pytest

from codetta.core.types import (
    AXES,
    DTYPES,
    KIND_OF_AXES,
    ROWS,
    Kind,
    Sym,
    Type,
    bf16,
    boolean,
    broadcast,
    colvec,
    compute_dtype,
    f16,
    f32,
    f64,
    groupvec,
    i32,
    i64,
    over,
    rowvec,
    scalar,
    table,
    tile,
    times,
)
from codetta.errors import ShapeError, TypeMismatch

N = 12
OF_KIND = {
    Kind.TILE: tile(N),
    Kind.ROWVEC: rowvec(N),
    Kind.COLVEC: colvec(),
    Kind.GROUPVEC: groupvec(3),
    Kind.TABLE: table(4),
    Kind.SCALAR: scalar(),
}


@pytest.mark.parametrize("a", Kind)
@pytest.mark.parametrize("b", Kind)
def test_broadcasting_joins_the_axes(a: Kind, b: Kind):
    expected = KIND_OF_AXES.get(AXES[a] | AXES[b])
    if expected is None:
        pytest.fail(f"{a} and {b} have no common kind")
    got = broadcast(OF_KIND[a], OF_KIND[b], bf16)
    assert got == broadcast(OF_KIND[b], OF_KIND[a], bf16)
    assert got == OF_KIND[expected].of(bf16)


@pytest.mark.parametrize(
    "a, b, message",
    [
        (tile(12), tile(8), "column counts differ: .*12.*8"),
        (tile(12), rowvec(8), "column counts differ"),
        (groupvec(3), groupvec(4), "sizes differ"),
        (table(3), table(4), "sizes differ"),
        (tile(12), groupvec(5), "12 columns do not divide by the 5 of a GroupVec"),
        (rowvec(12), table(8), "12 columns do not divide by the 8 of a Table"),
        (tile(12, rows=4), tile(12, rows=5), r"rows differ: .* \(4 != 5\)"),
        (tile(12), colvec(rows=5), r"rows differ: .* \(M != 5\)"),
        (groupvec(Sym("N")), table(4), "needs known sizes"),
    ],
)
def test_sizes_that_do_not_fit_are_named(a: Type, b: Type, message: str):
    with pytest.raises(ShapeError, match=message):
        broadcast(a, b, f32)


@pytest.mark.parametrize(
    "kind, rows, cols",
    [
        (Kind.TILE, ROWS, None),
        (Kind.TILE, None, 4),
        (Kind.ROWVEC, ROWS, 4),
        (Kind.COLVEC, ROWS, 4),
        (Kind.COLVEC, None, None),
        (Kind.GROUPVEC, ROWS, None),
        (Kind.TABLE, None, 4),
        (Kind.SCALAR, ROWS, None),
        (Kind.SCALAR, None, 1),
    ],
)
def test_a_kind_has_its_axes_and_no_others(kind, rows, cols):
    with pytest.raises(ShapeError, match=f"a {kind.value} cannot have rows={rows}, cols={cols}"):
        Type(kind, f32, rows, cols)


@pytest.mark.parametrize(
    "dtypes, expected",
    [
        ((bf16, bf16), f32),
        ((bf16, f16), f32),
        ((f16, i64), f32),
        ((bf16, f64), f64),
        ((i32, i64), i64),
        ((i32, boolean), i32),
        ((boolean,), boolean),
    ],
)
def test_arithmetic_is_done_in_float32_or_wider(dtypes, expected):
    assert compute_dtype(*dtypes) is expected


def test_symbols_are_scaled_exactly():
    n = Sym("N")
    assert over(times(n, 2), 3) == Sym("N", Fraction(2, 3))
    assert over(times(n, 3), 3) == n
    assert (repr(n), repr(times(n, 2)), repr(over(times(n, 3), 2))) == ("N", "2*N", "3*N/2")


@pytest.mark.parametrize("d, parts", [(12, 5), (12, 0), (12, -2), (0, 0)])
def test_integers_divide_without_rest(d, parts):
    with pytest.raises(ShapeError, match=f"size {d} does not divide into {parts} equal parts"):
        over(d, parts)
    assert over(12, 4) == 3


def test_types_print_as_the_language_says_them():
    assert [repr(t) for t in OF_KIND.values()] == [
        "Tile[M, 12, f32]",
        "RowVec[12, f32]",
        "ColVec[M, f32]",
        "GroupVec[M, 3, f32]",
        "Table[M, 4, f32]",
        "Scalar[f32]",
    ]
    assert all(repr(d) == name for name, d in DTYPES.items())


def test_a_type_in_another_dtype_keeps_its_sizes():
    assert tile(8, f32, rows=3).of(i32) == tile(8, i32, rows=3)


def test_kinds_without_a_union_are_refused(monkeypatch):
    """Every pair of today's kinds has one; a kind added later may not."""
    monkeypatch.delitem(KIND_OF_AXES, AXES[Kind.TILE])
    with pytest.raises(TypeMismatch, match="do not broadcast to one kind"):
        broadcast(rowvec(4), colvec(), f32)
