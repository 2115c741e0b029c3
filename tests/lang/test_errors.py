"""Every mistake names the user's line, the value, and the way out."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from codetta.core.types import bf16, f32
from codetta.errors import BlockLocalError, CodettaError, ShapeError, TypeMismatch, UnsupportedError
from codetta.lang.annotations import ColVec, RowVec, Tile, Value
from codetta.lang.functions import columns, exp, halves, rsqrt, sum_row
from codetta.lang.source import parse_program
from codetta.lang.trace import epilogue, finalize, leftover

Role = Callable[[Callable[..., object]], object]
CASES: list[tuple[Role, Callable[..., object], type[CodettaError], str, str]] = []


def wrong(role: Role, error: type[CodettaError], message: str, hint: str) -> Callable[..., None]:
    """A function that must be refused. Its line with `#!` must be named; with none, the line of its `def`."""

    def enter(function: Callable[..., object]) -> None:
        CASES.append((role, function, error, message, hint))

    return enter


# --- the block-local rule ---------------------------------------------------------------------------------------------


@wrong(epilogue, BlockLocalError, "`ssq / 4096.0` needs `ssq` (= sum_row(x * x)), which crosses tiles", "finalize")
def normalised(acc: Tile, gain: RowVec):
    x = acc * gain
    ssq = sum_row(x * x)
    rstd = rsqrt(ssq / 4096.0 + 1e-6)  #!
    return dict(y=x * rstd)


@wrong(epilogue, BlockLocalError, "`acc * sum_row(acc)` needs `sum_row(acc)`, which crosses tiles", "next program's")
def inlined(acc: Tile):
    return acc * sum_row(acc)  #!


@wrong(epilogue, BlockLocalError, "`twice` (= total * 2.0) needs `total` (= sum_row(acc))", "reduce it to a partial")
def named_by_its_output(acc: Tile):
    values = [sum_row(acc)]
    return dict(total=values[0], twice=values[0] * 2.0)  #!


@wrong(epilogue, BlockLocalError, "`k * v` combines columns that lie in different tiles", "halves or adjacent")
def across_ranges(acc: Tile[6144]):
    _, k, v = columns(acc, 4096, 1024, 1024)
    return k * v  #!


@wrong(finalize, BlockLocalError, "a finalize works on vectors, not on the Tile `x`", "use a leftover")
def wide_finalize(x: Tile):
    return x * 2.0  # an input is made by no line of the body


# --- Python on traced values ------------------------------------------------------------------------------------------


@wrong(epilogue, TypeMismatch, "this Tile[M, N, boolean] has no value yet", "where(condition, a, b)")
def branches(acc: Tile):
    if acc > 0:  #!
        return acc
    return -acc


@wrong(epilogue, TypeMismatch, "`if`, `while`, `and`", "combine with & | ~")
def chained(acc: Tile):
    return exp(0 < acc < 1)  #!


@wrong(epilogue, TypeMismatch, "float(), int(), len()", "Scalar parameter")
def converts(acc: Tile):
    return acc * float(acc)  #!


@wrong(epilogue, TypeMismatch, "float(), int(), len()", "Python constant")
def pythons_math(acc: Tile):
    return math.exp(acc)  #!


@wrong(epilogue, TypeMismatch, "torch's exp on a traced Tile", "from codetta")
def torchs(acc: Tile):
    return torch.exp(acc)  #!


@wrong(epilogue, TypeMismatch, "torch's", "from codetta")
def a_tensor(acc: Tile):
    return torch.ones(3) * acc  #!


@wrong(epilogue, TypeMismatch, "cannot be indexed or unpacked", "halves, adjacent, columns")
def unpacks(acc: Tile):
    a, b = acc  #!
    return a * b


@wrong(epilogue, TypeMismatch, "cannot be indexed or unpacked", "select_column")
def indexes(acc: Tile):
    return acc[0]  #!


@wrong(epilogue, TypeMismatch, "** takes the exponents 2, -1, 0.5 and -0.5, not 3", "write a product")
def cubes(acc: Tile):
    return acc**3  #!


@wrong(epilogue, TypeMismatch, "a power with a traced exponent", "exp(x * log(base))")
def powers(acc: Tile):
    return 2**acc  #!


@wrong(epilogue, TypeMismatch, "name 'gelo' is not defined", "did you mean gelu")
def misspelt(acc: Tile):
    return gelo(acc)  # noqa: F821  #!


@wrong(epilogue, TypeMismatch, "name 'silu' is not defined", "`from codetta import silu`")
def not_imported(acc: Tile):
    return silu(acc)  # noqa: F821  #!


@wrong(epilogue, TypeMismatch, "takes 1 positional argument but 2 were given", "Python on traced values")
def too_many(acc: Tile):
    return sum_row(acc, 1)  #!


@wrong(epilogue, TypeMismatch, "add takes traced values and numbers, not None", "parameters")
def adds_none(acc: Tile):
    return acc + None  #!


@wrong(epilogue, TypeMismatch, "mul takes traced values and numbers, not a tuple", "`a, b = halves(x)`")
def forgets_the_parts(acc: Tile):
    return acc * halves(acc)  #!


# --- kinds and sizes --------------------------------------------------------------------------------------------------


@wrong(epilogue, ShapeError, "mul: column counts differ: Tile[M, N, f32] and RowVec[1024, f32]", "")
def sizes_differ(acc: Tile, gain: RowVec[1024]):
    return acc * gain  #!


@wrong(epilogue, TypeMismatch, "ColVec[M, f32] cannot be reduced to a ColVec", "")
def reduces_a_vector(acc: Tile, r: ColVec):
    return acc * sum_row(r)  #!


@wrong(epilogue, TypeMismatch, "add: arithmetic on a boolean", "")
def adds_booleans(acc: Tile):
    return (acc > 0) + 1  #!


@wrong(epilogue, ShapeError, "does not divide", "")
def odd_groups(acc: Tile[100]):
    a, _ = halves(acc, groups=3)  #!
    return a


# --- the signature ----------------------------------------------------------------------------------------------------


@wrong(epilogue, TypeMismatch, "has no parameter `acc`", "def no_accumulator(acc: Tile, x)")
def no_accumulator(x: Tile):
    return x


@wrong(epilogue, TypeMismatch, "has `acc` in another place", "def late_accumulator(acc: Tile, x)")
def late_accumulator(x: Tile, acc: Tile):
    return x


@wrong(epilogue, TypeMismatch, "`acc` is a ColVec", "`acc: Tile`")
def thin_accumulator(acc: ColVec):
    return acc


@wrong(epilogue, TypeMismatch, "parameter `eps` has a default value, 1e-06", "`eps: Scalar`")
def with_default(acc: Tile, eps: ColVec = 1e-6):
    return acc


@wrong(epilogue, TypeMismatch, "parameter `more` is starred", "`more: Tile`")
def with_star(acc: Tile, *more: Tile):
    return acc


@wrong(epilogue, TypeMismatch, "parameter `x` has no annotation", "Tile, RowVec, ColVec, GroupVec, Table, Scalar")
def bare(acc: Tile, x):
    return acc


@wrong(epilogue, TypeMismatch, "parameter `x` is annotated <class 'torch.Tensor'>, no kind of value", "`x: Tile`")
def tensor_parameter(acc: Tile, x: torch.Tensor):
    return acc


@wrong(epilogue, TypeMismatch, "the annotation `Tiel` cannot be read", "annotate it with one of")
def misspelt_annotation(acc: Tile, x: "Tiel"):  # noqa: F821
    return acc


# --- the result -------------------------------------------------------------------------------------------------------


@wrong(epilogue, TypeMismatch, "the function returns nothing", "return dict(name=value, ...)")
def no_return(acc: Tile):
    acc * 2.0


@wrong(epilogue, TypeMismatch, "the function returns a tuple", "return dict(name=value, ...)")
def returns_a_tuple(acc: Tile):
    return acc, acc


@wrong(epilogue, TypeMismatch, "the function returns an empty dict", "return dict(name=value, ...)")
def returns_no_output(acc: Tile):
    return {}


@wrong(epilogue, TypeMismatch, "output `y` is the plain number 3.0", "const(3.0)")
def returns_a_number(acc: Tile):
    return dict(y=3.0)


@wrong(epilogue, TypeMismatch, "output `y` is a str, no traced value", "return dict(name=value, ...)")
def returns_text(acc: Tile):
    return dict(y="acc")


@wrong(epilogue, TypeMismatch, "output `ab` is a tuple", "each part under its own name")
def returns_parts(acc: Tile):
    return dict(ab=halves(acc))


@wrong(epilogue, TypeMismatch, "an output is called 1; names are text", "return dict(name=value, ...)")
def returns_numbered(acc: Tile):
    return {1: acc}


SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()


def marked_line(function: Callable[..., object]) -> int:
    first = next(i for i in range(function.__code__.co_firstlineno, len(SOURCE)) if SOURCE[i - 1].startswith("def "))
    for i in range(first + 1, first + 6):
        if i <= len(SOURCE) and "#!" in SOURCE[i - 1]:
            return i
        if i <= len(SOURCE) and not SOURCE[i - 1]:
            break
    return first


@pytest.mark.parametrize("role, function, error, message, hint", CASES, ids=[case[1].__name__ for case in CASES])
def test_a_mistake_is_told(role, function, error, message, hint):
    with pytest.raises(error) as caught:
        role(function)
    e = caught.value
    assert type(e) is error
    assert message in e.message
    assert hint in (e.hint or "")
    line = marked_line(function)
    assert (e.where.file, e.where.line) == (__file__, line)
    assert e.where.text == SOURCE[line - 1].strip()


def test_the_line_is_this_functions_although_another_made_the_same_node_first():
    def first(acc: Tile[7]):
        return dict(s=sum_row(acc), y=acc)

    def second(acc: Tile[7]):
        s = sum_row(acc)
        return acc * s

    epilogue(first)
    for _ in range(2):  # the second time, the offending node exists already
        with pytest.raises(BlockLocalError) as caught:
            epilogue(second)
        assert caught.value.where.text == "return acc * s"
        assert "`s` (= sum_row(acc))" in caught.value.message


def test_helpers_are_followed_to_the_line_that_fails():
    def helper(x: Value) -> Value:
        return x + "one"

    def f(acc: Tile):
        return helper(acc)

    with pytest.raises(TypeMismatch) as caught:
        epilogue(f)
    assert caught.value.where.text == 'return x + "one"'


def test_leftovers_may_use_a_row_but_not_a_column():
    def softmax(x: Tile):
        e = exp(x)
        return e / sum_row(e)

    def whitened(x: Tile):
        from codetta.lang.functions import sum_col

        return x - sum_col(x)

    leftover(softmax)
    with pytest.raises(BlockLocalError, match=r"crosses rows"):
        leftover(whitened)


def test_a_users_own_exception_passes():
    def f(acc: Tile):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        epilogue(f)


@pytest.mark.parametrize(
    "options", [{"gemm": "nt"}, {"k": 8}, {"gemm": "tt", "k": 8, "dtype": f32}, {"gemm": "nt", "k": 8}]
)
def test_half_a_gemm(options):
    with pytest.raises(UnsupportedError, match="a GEMM has a form, an inner size and an operand dtype"):
        epilogue(**options)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (-1,), (True,), ("N+1",), (1.5,), (bf16, 3)])
def test_no_size(sizes):
    with pytest.raises(ShapeError, match=r"is no size|too many sizes"):
        Tile[sizes]


@pytest.mark.parametrize(
    "text, message",
    [
        ("def f(acc: Tile):\n    return acc\n", "the function needs one role"),
        ("import os\n", "holds exactly one function"),
        ("x = 1\n", "holds exactly one function"),
        ("@epilogue\ndef f(acc: Tile)\n    return acc\n", "no Python"),
        ("@epilogue\ndef f(acc: Tile[64, bfloat16]):\n    return acc\n", "name 'bfloat16' is not defined"),
        ("@epilogue\ndef f(acc: Tile):\n    return open('x')\n", "name 'open' is not defined"),
        ("@epilogue(speed=9)\ndef f(acc: Tile):\n    return acc\n", "unexpected keyword argument 'speed'"),
    ],
)
def test_a_text_that_is_no_program(text, message):
    with pytest.raises(CodettaError, match=message):
        parse_program(text)


def test_an_error_in_a_text_shows_its_line():
    with pytest.raises(CodettaError) as caught:
        parse_program("@epilogue\ndef f(acc: Tile, s: Scalar):\n    return acc * relu(s)\n")
    assert str(caught.value.where) == "<program>:3: return acc * relu(s)"
