"""A program's text is valid source, and tracing it gives the same program back."""

import keyword
import math
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codetta.core.node import Node, node
from codetta.core.types import (
    DTYPES,
    ROWS,
    Dim,
    Kind,
    Sym,
    Type,
    bf16,
    boolean,
    colvec,
    f32,
    groupvec,
    i32,
    i64,
    rowvec,
    scalar,
    table,
    tile,
)
from codetta.errors import CodettaError
from codetta.ir import build, legal, ops, split
from codetta.ir.program import Gemm, Program
from codetta.ir.split import Split
from codetta.lang.source import NAMES, parse_program, program_text

DTYPE = list(DTYPES.values())

# --- random programs --------------------------------------------------------------------------------------------------

COLS = [64, 48, Sym("N"), Sym("N", Fraction(1, 2))]
ROW_COUNTS = [ROWS, ROWS, 96, Sym("T")]
GROUPS = [1, 2, 4]
STRANGE_NAMES = [*sorted(NAMES), *keyword.kwlist, "dict", "t1", "_", "epilogue", "__debug__", "match"]
STRANGE_NAMES += ["a.b", "ﬁ", '"', "'", "\\", "\n", "", "é", "1"]
NUMBERS = [0, 1, -1, True, False, 0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-6, -2.5, 1e300, 10**30]
SPLITS = [
    *(split.halves(g) for g in GROUPS),
    split.ADJACENT,
    *(Split(g, n) for g in GROUPS for n in (1, 3, 8)),
    *(split.columns(*sizes, groups=g) for sizes in ((32, 16, 16), (16, 8), (40, 24), (8, 4)) for g in (1, 2)),
]
MAPS = {op for op in ops.OPS.values() if op.family == "map"}
UNARY = {
    *(ops.NEG, ops.ABS, ops.NOT, ops.EXP, ops.LOG, ops.TANH, ops.ERF, ops.SQRT, ops.RSQRT, ops.RECIP),
    *(ops.SIN, ops.COS, ops.SIGMOID, ops.SILU, ops.GELU, ops.GELU_TANH),
}
BINARY = MAPS - UNARY - {ops.WHERE, ops.RANDOM, ops.CAST, ops.EXPAND}


def random_program(rng: Random) -> Program:
    """A program of any role, op, kind and dtype, with shared values and names that are hard to print."""
    role = rng.choice(["epilogue", "epilogue", "finalize", "leftover"])
    shapes = _shapes(rng.choice(ROW_COUNTS), rng.choice(COLS), rng.choice(GROUPS))
    names = {_name(rng) for _ in range(rng.randint(1, 5))} - {"acc"}
    params = [build.input_(n, rng.choice(shapes).of(rng.choice([f32, rng.choice(DTYPE)]))) for n in sorted(names)]
    if role == "epilogue":
        params.insert(0, build.input_("acc", shapes[0].of(rng.choice([f32, bf16]))))
    pool = list(params)
    for _ in range(rng.randint(0, 40)):
        try:
            pool.append(_step(rng, pool))
        except CodettaError:
            continue
    gemm = Gemm(rng.choice(["nt", "nn", "tn"]), rng.choice([64, ROWS]), rng.choice([bf16, f32]))
    bound = gemm if role == "epilogue" and rng.random() < 0.5 else None
    return Program(_name(rng), role, tuple(params), _outputs(rng, role, pool), bound)


def _shapes(rows: Dim, cols: Dim, groups: int) -> list[Type]:
    whole = [tile(cols, rows=rows), rowvec(cols), colvec(rows=rows), groupvec(groups, rows=rows), scalar()]
    return [*whole, tile(cols, rows=rows), table(cols // groups if isinstance(cols, int) else cols, rows=rows)]


def _name(rng: Random) -> str:
    return (
        rng.choice(STRANGE_NAMES) if rng.random() < 0.3 else rng.choice("abcdexyz") + rng.choice(["", "", "_row", "2"])
    )


def _outputs(rng: Random, role: str, pool: list[Node]) -> tuple[tuple[str, Node], ...]:
    acc = pool[0] if role == "epilogue" else None
    found: dict[str, Node] = {}
    for n in [pool[-1], *rng.choices(pool, k=rng.randint(0, 5)), build.const(rng.choice(NUMBERS))]:
        if legal.why_not(role, [*found.values(), n], acc) is None:
            found.setdefault(_name(rng), n)
    return tuple(found.items())


def _step(rng: Random, pool: list[Node]) -> Node:
    """One op on values of the pool, mostly late ones; an ill-typed choice raises."""
    x, y = (rng.choice(pool[-5:] if rng.random() < 0.5 else pool) for _ in range(2))
    return rng.choice([_map, _map, _map, _columns, _reduction, _rare])(rng, pool, x, y)


def _map(rng: Random, pool: list[Node], x: Node, y: Node) -> Node:
    if rng.random() < 0.2:
        y = build.const(rng.choice(NUMBERS))
    if rng.random() < 0.3:
        x, y = y, x
    booleans = [n for n in pool if n.type.dtype is boolean] or [build.apply(rng.choice([ops.LT, ops.EQ, ops.GE]), x, y)]
    integers = [n for n in pool if n.type.dtype in (i32, i64)] or [build.cast(x, i32)]
    match rng.randrange(8):
        case 0:
            return build.where(rng.choice(booleans), x, y)
        case 1:
            return build.apply(rng.choice([ops.AND, ops.OR]), rng.choice(booleans), rng.choice([*booleans, True]))
        case 2:
            return build.apply(rng.choice([ops.MOD, ops.FLOORDIV]), rng.choice(integers), rng.choice([*integers, 7]))
        case 3:
            return build.apply(ops.RANDOM, *rng.choices([*integers, build.const(7)], k=3))
        case 4 | 5:
            return build.apply(rng.choice(sorted(UNARY, key=str)), rng.choice([x, x, rng.choice(booleans)]))
    return build.apply(rng.choice(sorted(BINARY, key=str)), x, y)


def _columns(rng: Random, pool: list[Node], x: Node, y: Node) -> Node:
    how = rng.choice(SPLITS)
    parts = build.parts(x, how)
    if rng.random() < 0.5:
        pool.extend(rng.sample(parts[1:], rng.randint(0, len(parts) - 1)))
        return parts[0]
    return build.join(how, *(rng.choice([p, build.apply(ops.SILU, p), y, 0.0, 0]) for p in parts))


def _reduction(rng: Random, pool: list[Node], x: Node, y: Node) -> Node:
    match rng.randrange(8):
        case 0:
            return build.logsumexp_row(x)
        case 1:
            integers = [n for n in pool if n.type == colvec(i32, x.type.rows or ROWS)]
            return build.select_column(x, rng.choice(integers or [y]))
    return build.reduce(x, rng.choice(["sum", "max", "absmax"]), rng.choice(list(Kind)), rng.choice(GROUPS))


def _rare(rng: Random, pool: list[Node], x: Node, y: Node) -> Node:
    match rng.randrange(7):
        case 0:
            return node(ops.CAST, x, attrs=(rng.choice(DTYPE),))
        case 1:
            return build.expand(x, y.type)
        case 2:
            return build.column(rng.choice([*COLS, x.type.cols or 8]))
        case 3:
            return build.row(rng.choice([*ROW_COUNTS, x.type.rows or 8]))
        case 4:
            return build.turn(x)
        case 5:
            return node(ops.STACK, x, rng.choice([x, y, build.const(0.0)]), attrs=(x.type.rows, x.type.rows))
    return build.take_rows(x, 0, rng.choice([8, 96]))


@pytest.mark.parametrize("block", range(4))
def test_text_traces_back_to_the_same_program(block: int):
    for seed in range(block * 500, block * 500 + 500):
        program = random_program(Random(seed))
        text = program_text(program)
        assert parse_program(text) == program, text
        assert program_text(parse_program(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_text_traces_back_to_the_same_program_whatever_is_drawn(rng: Random):
    program = random_program(rng)
    assert parse_program(program_text(program)) == program


def test_random_programs_reach_every_op_and_role():
    seen = [random_program(Random(seed)) for seed in range(2000)]
    reached = {n.op.name for p in seen for n in p.body}
    assert reached == set(ops.OPS) - {"matmul"}
    assert {p.role for p in seen} == {"epilogue", "finalize", "leftover"}


@settings(max_examples=200)
@given(st.one_of(st.floats(), st.integers(), st.booleans()))
def test_numbers_trace_back(value: float):
    p = Program("p", "finalize", (), (("y", build.const(value)),))
    assert parse_program(program_text(p)) == p


@settings(max_examples=200)
@given(st.text(), st.text(), st.text())
def test_names_trace_back(program: str, param: str, output: str):
    x = build.input_(param, colvec())
    p = Program(program, "finalize", (x,), ((output, build.mul(x, 2.0)),))
    assert parse_program(program_text(p)) == p


ACC = build.input_("acc", tile(64))


def body(outputs: dict[str, Node], *params: Node) -> str:
    """The lines below the signature of an epilogue with these outputs."""
    text = program_text(Program("f", "epilogue", (ACC, *params), tuple(outputs.items())))
    return text.split(":\n", 1)[1]


def test_values_used_once_are_inlined_with_the_parentheses_they_need():
    x, g = build.input_("x", tile(64)), build.input_("g", rowvec(64))
    value = build.mul(build.sub(ACC, build.add(x, g)), build.neg(build.sub(build.sub(x, g), 1.0)))
    assert body({"y": value}, x, g) == "    return dict(y=(acc - (x + g)) * -(x - g - 1.0))\n"


def test_numbers_are_not_left_to_python():
    value = build.mul(ACC, build.add(2.0, -3.0))
    chosen = build.where(build.apply(ops.LT, 0.0, ACC), value, build.neg(-1.0))
    assert body({"y": chosen}) == "    return dict(y=where(lt(0.0, acc), acc * add(2.0, -3.0), neg(-1.0)))\n"


def test_parts_are_named_together():
    q, k, v = build.parts(ACC, split.columns(32, 16, 16))
    eight = build.parts(ACC, Split(1, 8))
    outputs = {"q": build.mul(q, q), "k": k, "five": build.neg(eight[5]), "one": eight[1]}
    assert body(outputs) == (
        "    t1, k, _ = columns(acc, 32, 16, 16)\n"
        "    t2 = equal_columns(acc, 8)\n"
        "    return dict(q=t1 * t1, k=k, five=-t2[5], one=t2[1])\n"
    )
    assert body({"v": build.neg(v)}).splitlines()[0] == "    _, _, t1 = columns(acc, 32, 16, 16)"


def test_shared_values_have_their_outputs_name_or_a_short_one():
    x = build.input_("x", tile(64))
    y, z = build.add(ACC, x), build.mul(ACC, x)
    outputs = {"x": y, "z": z, "sum_row": build.add(build.mul(y, y), build.mul(z, z))}
    assert body(outputs, x) == (
        "    t1 = acc + x\n"  # x is taken by the parameter
        "    z = acc * x\n"
        "    return dict(x=t1, z=z, sum_row=t1 * t1 + z * z)\n"
    )


def test_lines_stay_short():
    n: Node = ACC
    for i in range(40):
        n = build.add(build.mul(n, float(i)), build.apply(ops.SIN, ACC))
    lines = body({"y": n}).splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 100


def test_deep_and_shared_programs_print_in_linear_time():
    n: Node = ACC
    for _ in range(3000):
        n = build.add(n, n)
    p = Program("deep", "epilogue", (ACC,), (("y", n),))
    assert parse_program(program_text(p)) == p
