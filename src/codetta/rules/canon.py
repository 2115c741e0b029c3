"""Identities, and casts moved to where values are stored."""

from __future__ import annotations

from codetta.core.node import Node, node
from codetta.core.rewrite import Registry
from codetta.core.types import Kind, f32
from codetta.ir import ops
from codetta.ir.build import add, apply, cast, const, div, expand, join, mul, neg, sub, sum_row, where
from codetta.ir.split import Split, halves
from codetta.rules.match import (
    EXACT,
    either_way,
    gain,
    is_arithmetic,
    is_const,
    is_number,
    narrow,
    number,
    rebuilt,
    rebuilt_if_fitting,
    scale,
    x_tile,
)

CANON = Registry()
rule = CANON.rule


@rule("x + 0 = x", lambda: add(x_tile(), 0.0))
def add_zero(n: Node) -> Node | None:
    """Also x - 0. Only where no broadcast hides in it."""
    for x, zero in [*either_way(n, ops.ADD), *([n.args] if n.op is ops.SUB else [])]:
        if is_number(zero, 0) and x.type == n.type:
            return x
    return None


@rule("x * 1 = x", lambda: mul(x_tile(), 1.0))
def mul_one(n: Node) -> Node | None:
    """Also x / 1."""
    for x, one in [*either_way(n, ops.MUL), *([n.args] if n.op is ops.DIV else [])]:
        if is_number(one, 1) and x.type == n.type:
            return x
    return None


@rule("-(-x) = x", lambda: neg(neg(x_tile())))
def neg_neg(n: Node) -> Node | None:
    """Signs cancel."""
    return cast(n.args[0].args[0], n.type.dtype) if n.op is ops.NEG and n.args[0].op is ops.NEG else None


@rule("x + (-y) = x - y", lambda: add(x_tile(), neg(x_tile("y"))))
def add_neg(n: Node) -> Node | None:
    """A negated term is subtracted."""
    for x, y in either_way(n, ops.ADD):
        if y.op is ops.NEG:
            return sub(x, y.args[0])
    return None


@rule("(-x) y = -(x y)", lambda: mul(neg(x_tile()), x_tile("y")))
def sign_outermost(n: Node) -> Node | None:
    """So that a sum becomes a difference; not past a row scale, which is outermost itself."""
    for x, y in either_way(n, ops.MUL):
        if x.op is ops.NEG and y.type.kind is not Kind.COLVEC:
            return neg(mul(x.args[0], y))
    return None


@rule("c x = x c", lambda: mul(2.0, x_tile()))
def number_last(n: Node) -> Node | None:
    """A number stands right of what it scales."""
    if n.op is ops.MUL and is_const(n.args[0]) and not is_const(n.args[1]):
        return rebuilt(n, n.args[1], n.args[0])
    return None


@rule("(x a) b = x (a b)", lambda: mul(mul(x_tile(), 3.0), 0.5))
def fold_numbers(n: Node) -> Node | None:
    """Two numbers become one."""
    if n.op is not ops.MUL or not is_const(n.args[1]):
        return None
    x, b = n.args
    if is_const(x):
        return const(number(x) * number(b))
    if x.op is ops.MUL and is_const(x.args[1]):
        return mul(x.args[0], number(x.args[1]) * number(b))
    return None


@rule("(x r) c = x (r c) for one number r per row or column", lambda: mul(mul(x_tile(), scale()), 3.0))
def number_into_vector(n: Node) -> Node | None:
    """A number scales a vector, in a finalize, rather than a Tile."""
    if n.op is not ops.MUL or not is_const(n.args[1]) or n.type.kind is not Kind.TILE:
        return None
    for x, r in either_way(n.args[0], ops.MUL):
        if r.type.kind in (Kind.COLVEC, Kind.ROWVEC) and x.type.kind is Kind.TILE:
            return mul(x, mul(r, n.args[1]))
    return None


@rule("x + x = 2 x", lambda: add(x_tile(), x_tile()))
def double(n: Node) -> Node | None:
    """The two terms of a square's derivative."""
    return mul(n.args[0], 2.0) if n.op is ops.ADD and n.args[0] is n.args[1] and n.type.dtype.is_float else None


@rule("(y + x) + x = y + 2 x", lambda: add(add(x_tile("y"), x_tile()), x_tile()))
def double_behind(n: Node) -> Node | None:
    """As they come out of the reverse walk."""
    if n.op is ops.ADD and n.args[0].op is ops.ADD and n.args[0].args[1] is n.args[1] and n.type.dtype.is_float:
        return add(n.args[0].args[0], mul(n.args[1], 2.0))
    return None


@rule("1 / sqrt(x) = rsqrt(x)", lambda: apply(ops.RECIP, apply(ops.SQRT, mul(scale(), scale()))))
def recip_sqrt(n: Node) -> Node | None:
    """One op for the norm's scale."""
    return apply(ops.RSQRT, n.args[0].args[0]) if n.op is ops.RECIP and n.args[0].op is ops.SQRT else None


@rule("x / r = x (1 / r) for one number r per row", lambda: div(x_tile(), scale()))
def divide_by_row(n: Node) -> Node | None:
    """A row's divisor is inverted once, in a finalize."""
    if n.op is ops.DIV and n.type.kind is Kind.TILE and n.args[1].type.kind is Kind.COLVEC:
        return mul(n.args[0], apply(ops.RECIP, n.args[1]))
    return None


@rule("f(expand x, y) = f(x, y)", lambda: add(expand(scale(), x_tile().type), x_tile()))
def expand_in_map(n: Node) -> Node | None:
    """Maps broadcast by themselves."""
    if n.op.family != "map" or n.op is ops.EXPAND:
        return None
    for i, a in enumerate(n.args):
        if a.op is ops.EXPAND:
            found = rebuilt_if_fitting(n, *n.args[:i], a.args[0], *n.args[i + 1 :])
            if found is not None and found.type == n.type:
                return found
    return None


@rule("f(expand x) = expand f(x)", lambda: neg(expand(scale(), x_tile().type)))
def expand_after_map(n: Node) -> Node | None:
    """What is the same along an axis is computed once."""
    if n.op.family != "map" or n.op is ops.EXPAND or not any(a.op is ops.EXPAND for a in n.args):
        return None
    found = rebuilt_if_fitting(n, *(a.args[0] if a.op is ops.EXPAND else a for a in n.args))
    return None if found is None or found.type == n.type else expand(found, n.type)


# --- casts: rounding belongs to stores ------------------------------------------------------------------------------


@rule("f(round x) = f(x)", lambda: mul(narrow(x_tile()), 2.0))
def round_before_arithmetic(n: Node) -> Node | None:
    """Arithmetic is done in the compute dtype: a value that was rounded only to be computed with again is not rounded,
    a stored value that was widened for arithmetic is widened by it anyway. A comparison sees what was rounded: a
    largest element equals itself. So do a log-sum-exp and the choice of a column: backward has the rounded logits, and
    exp(z - lse) sums to 1 only with the lse of these."""
    if not (is_arithmetic(n) or n.op is ops.REDUCE) or n.op in EXACT:
        return None
    for i, a in enumerate(n.args):
        if a.op is ops.CAST and a.type.dtype.is_float and a.args[0].type.dtype.is_float:
            found = rebuilt(n, *n.args[:i], a.args[0], *n.args[i + 1 :])
            if found.type == n.type:
                return found
    return None


@rule("round round x = round x", lambda: cast(narrow(x_tile()), f32))
def cast_of_cast(n: Node) -> Node | None:
    """Only the last storage type counts."""
    if n.op is ops.CAST and n.args[0].op is ops.CAST:
        inner = n.args[0].args[0]
        if n.type.dtype.is_float and n.args[0].type.dtype.is_float and inner.type.dtype.is_float:
            return cast(inner, n.type.dtype)
    return None


@rule("part(round x) = round part(x)", lambda: node(ops.PART, narrow(neg(x_tile())), attrs=(halves(2), 1)))
def cast_after_columns(n: Node) -> Node | None:
    """Taking columns commutes with a cast, which moves to the store."""
    if n.op in (ops.PART, ops.TURN) and n.args[0].op is ops.CAST:
        inner = n.args[0].args[0]
        if inner.op is not ops.INPUT:
            return cast(rebuilt(n, inner), n.type.dtype)
    return None


@rule("round take_rows(x) = take_rows(round x)", lambda: narrow(node(ops.TAKE_ROWS, x_tile_static(), attrs=(2, 5))))
def cast_before_rows(n: Node) -> Node | None:
    """A stacked weight gradient is stored whole, then viewed."""
    if n.op is ops.CAST and n.args[0].op is ops.TAKE_ROWS and n.args[0].args[0].op is ops.MATMUL:
        inner = n.args[0]
        return rebuilt(inner, cast(inner.args[0], n.type.dtype))
    return None


def x_tile_static() -> Node:
    """A weight gradient, the example of the rule above."""
    return node(ops.MATMUL, x_tile("a", 6), x_tile("b", 4), attrs=("tn",))


@rule(
    "join(round a, round b) = round join(a, b)", lambda: join(halves(), narrow(neg(x_tile())), narrow(neg(x_tile("y"))))
)
def cast_after_join(n: Node) -> Node | None:
    """As for parts; numbers need no cast."""
    if n.op is not ops.JOIN:
        return None
    cast_parts = [a for a in n.args if not is_const(a)]
    if not cast_parts or any(a.op is not ops.CAST or a.args[0].op is ops.INPUT for a in cast_parts):
        return None
    if not n.type.dtype.is_float or any(not a.args[0].type.dtype.is_float for a in cast_parts):
        return None
    return cast(rebuilt(n, *(a if is_const(a) else a.args[0] for a in n.args)), n.type.dtype)


# --- sums -----------------------------------------------------------------------------------------------------------


@rule("sum_row(x r) = sum_row(x) r for one number r per row", lambda: sum_row(mul(x_tile(), scale())))
def row_factor_leaves_sum(n: Node) -> Node | None:
    """A factor that is the same for the whole row is applied once, in a finalize."""
    return _factor_leaves_sum(n, Kind.COLVEC)


@rule(
    "sum_col(x g) = sum_col(x) g for one number g per column",
    lambda: node(ops.REDUCE, mul(x_tile(), gain()), attrs=("sum", Kind.ROWVEC, None)),
)
def column_factor_leaves_sum(n: Node) -> Node | None:
    """A factor that is the same for the whole column is applied once, in a finalize."""
    return _factor_leaves_sum(n, Kind.ROWVEC)


def _factor_leaves_sum(n: Node, to: Kind) -> Node | None:
    if n.op is not ops.REDUCE or n.attrs[:2] != ("sum", to) or n.args[0].type.kind is not Kind.TILE:
        return None
    for x, factor in either_way(n.args[0], ops.MUL):
        if factor.type.kind in (to, Kind.SCALAR) and x.type.kind is Kind.TILE:
            return mul(rebuilt(n, x), factor)
    return None


@rule("sum_row(-x) = -sum_row(x)", lambda: sum_row(neg(x_tile())))
def sign_leaves_sum(n: Node) -> Node | None:
    """A sign too."""
    if n.op is ops.REDUCE and n.attrs[0] == "sum" and n.args[0].op is ops.NEG:
        return neg(rebuilt(n, n.args[0].args[0]))
    return None


@rule("where(c, r, 0) = where(c, 1, 0) r for one number r per row", lambda: where(_hit(), scale(), 0.0))
def row_factor_leaves_where(n: Node) -> Node | None:
    """The one-hot part of a softmax's gradient is scaled with the rest of its row."""
    if n.op is not ops.WHERE or n.args[0].type.kind is not Kind.TILE or not is_number(n.args[2], 0):
        return None
    factor = n.args[1]
    return mul(where(n.args[0], 1.0, 0.0), factor) if factor.type.kind is Kind.COLVEC else None


def _hit() -> Node:
    return apply(ops.GT, x_tile(), 0.0)


@rule(
    "x r + y (-r) = (x - y) r",
    lambda: add(mul(x_tile(), scale()), mul(x_tile("y"), neg(scale()))),
)
def common_row_factor(n: Node) -> Node | None:
    """Probability minus one is formed before it is scaled; x r + y r = (x + y) r, and with minus, likewise."""
    if n.op not in (ops.ADD, ops.SUB) or n.type.kind is not Kind.TILE:
        return None
    for x, r in either_way(n.args[0], ops.MUL):
        for y, s in either_way(n.args[1], ops.MUL):
            if r.type.kind is Kind.COLVEC and Kind.TILE is x.type.kind is y.type.kind:
                if r is s:
                    return mul(rebuilt(n, x, y), r)
                if s.op is ops.NEG and s.args[0] is r:
                    return mul(sub(x, y) if n.op is ops.ADD else add(x, y), r)
                if r.op is ops.NEG and r.args[0] is s:
                    return mul(sub(y, x) if n.op is ops.ADD else neg(add(x, y)), s)
    return None


@rule("part(join(x, y)) = x", lambda: node(ops.PART, join(halves(), x_tile(), x_tile("y")), attrs=(halves(), 0)))
def part_of_join(n: Node) -> Node | None:
    """Columns put together and taken apart again."""
    if n.op is ops.PART and n.args[0].op is ops.JOIN and n.args[0].attrs[0] == n.attrs[0]:
        index = n.attrs[1]
        return cast(expand(n.args[0].args[index], n.type), n.type.dtype) if isinstance(index, int) else None
    return None


@rule("join(part 0 of x, part 1 of x) = x", lambda: join(halves(2), *_two_parts()))
def join_of_parts(n: Node) -> Node | None:
    """Columns taken apart and put together again."""
    if n.op is not ops.JOIN or not isinstance(split := n.attrs[0], Split) or n.args[0].op is not ops.PART:
        return None
    whole = n.args[0].args[0]
    same = all(a.op is ops.PART and a.args[0] is whole and a.attrs == (split, i) for i, a in enumerate(n.args))
    return whole if same else None


def _two_parts() -> tuple[Node, Node]:
    x, split = x_tile(), halves(2)
    return node(ops.PART, x, attrs=(split, 0)), node(ops.PART, x, attrs=(split, 1))
