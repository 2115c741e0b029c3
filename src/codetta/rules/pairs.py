"""Pairs of lanes: a join moves towards the store, so that an epilogue works lane by lane."""

from __future__ import annotations

from codetta.core.node import Node, node
from codetta.core.rewrite import Registry
from codetta.core.types import Dim, Kind, Type, compute_dtype, table
from codetta.ir import ops
from codetta.ir.build import add, cast, const, expand, input_, join, mul, neg, part, sum_row
from codetta.ir.split import ADJACENT, Split, halves
from codetta.rules.match import is_arithmetic, is_const, is_number, rebuilt, row_scaled, x_tile

PAIRS = Registry()
rule = PAIRS.rule


def _rotated() -> Node:
    """Hugging Face's RoPE: q cos + join(-q1, q0) sin."""
    q, cos, sin, split = x_tile("q"), input_("cos", table(6)), input_("sin", table(6)), halves(2)
    turned = join(split, neg(part(q, split, 1)), part(q, split, 0))
    return add(mul(q, cos), mul(turned, sin))


@rule("f(join(a, b), x) = join(f(a, x0), f(b, x1))", _rotated)
def join_outermost(n: Node) -> Node | None:
    """A map of joined lanes is made lane by lane; the other operands are taken apart."""
    if not is_arithmetic(n) or n.type.kind not in (Kind.TILE, Kind.TABLE):
        return None
    if row_scaled(n) is not None:  # a row scale stays outside of the join, see scale.py
        return None
    found = next((a for a in n.args if a.op is ops.JOIN and a.type.kind is n.type.kind), None)
    if found is None or not isinstance(split := found.attrs[0], Split):
        return None
    if any(a.type.kind is Kind.GROUPVEC for a in n.args):
        return None
    lanes: list[Node] = []
    for i in range(split.parts):
        taken = [lane(a, split, i, n.type.cols) for a in n.args]
        args = [a for a in taken if a is not None]
        if len(args) < len(taken):
            return None
        lanes.append(_map(n, args, split, i))
    if all(is_const(x) for x in lanes):
        return None
    joined = node(ops.JOIN, *lanes, attrs=(split,), where=n.where)
    return joined if joined.type == n.type else None


def _map(n: Node, args: list[Node], split: Split, index: int) -> Node:
    """``n``'s op on one lane; zeros stay the number zero where the op keeps them so."""
    zero = [is_number(a, 0) for a in args]
    if any(zero) and (n.op in (ops.MUL, ops.NEG) or all(zero)) and n.op in (ops.MUL, ops.NEG, ops.ADD, ops.SUB):
        return const(0.0)
    found = rebuilt(n, *args) if n.op is not ops.ADD or not any(zero) else args[0] if zero[1] else args[1]
    if compute_dtype(found.type.dtype) is not compute_dtype(n.type.dtype):  # a number beside a float64 lane
        found = rebuilt(n, *(cast(a, of.type.dtype) for a, of in zip(args, n.args, strict=True)))
    if is_const(found) or n.type.cols is None:
        return found
    return expand(found, Type(n.type.kind, n.type.dtype, n.type.rows, split.part_cols(n.type.cols, index)))


def lane(a: Node, split: Split, index: int, cols: Dim | None) -> Node | None:
    """Lane ``index`` of an operand of something with ``cols`` columns, taken as deep inside as it is not yet stored or
    scaled by row; None where the lane of a GroupVec or Table would be neither."""
    if a.op is ops.JOIN and a.attrs[0] == split and a.type.cols == cols:
        return a.args[index]
    if a.type.kind in (Kind.COLVEC, Kind.SCALAR):
        return a
    if a.type.kind in (Kind.GROUPVEC, Kind.TABLE):
        return _factor_lane(a, split, index, cols)
    if a.op in (ops.MUL, ops.ADD, ops.SUB, ops.NEG) and any(x.type.kind is Kind.TABLE for x in a.args):
        taken = [lane(x, split, index, cols) for x in a.args]
        args = [x for x in taken if x is not None]
        return rebuilt(a, *args) if len(args) == len(taken) else part(a, split, index)
    return part(a, split, index)


def _factor_lane(a: Node, split: Split, index: int, cols: Dim | None) -> Node | None:
    """A GroupVec whose groups hold whole groups of the split is the same in each lane. Of a Table of whole groups the
    same lane is taken; one that repeats inside every part is the same in each."""
    if not isinstance(cols, int) or not isinstance(a.type.cols, int):
        return None
    width = 2 if split.adjacent else cols // split.groups
    if a.type.kind is Kind.GROUPVEC:
        return a if cols // a.type.cols % width == 0 else None
    inside = a.type.cols
    if split.adjacent:
        return part(a, split, index) if inside % 2 == 0 else None
    if inside % width == 0:
        return part(a, Split(inside // width, split.parts, split.sizes), index)
    sizes = split.sizes or (width // split.parts,) * split.parts
    return a if all(size % inside == 0 for size in sizes) else None


@rule("sum_row(join(a, b)) = sum_row(a + b)", lambda: sum_row(join(halves(2), x_tile(), x_tile("y"))))
def sum_of_join(n: Node) -> Node | None:
    """Lanes of equal width are summed together, ranges one by one."""
    if n.op is not ops.REDUCE or n.attrs[:2] != ("sum", Kind.COLVEC) or n.args[0].op is not ops.JOIN:
        return None
    split, lanes = n.args[0].attrs[0], [a for a in n.args[0].args if not is_number(a, 0)]
    if not isinstance(split, Split) or any(a.type.kind is not Kind.TILE for a in lanes):
        return None
    terms = lanes if split.is_pair else [sum_row(a) for a in lanes]
    total = terms[0]
    for t in terms[1:]:
        total = add(total, t)
    return sum_row(total) if split.is_pair else total


@rule(
    "part(x cos) = part(x) part(cos)",
    lambda: part(mul(x_tile(), input_("cos", table(6))), halves(2), 1),
)
def lane_of_table_product(n: Node) -> Node | None:
    """The lanes of a product with a table are products of lanes."""
    if n.op is not ops.PART or not isinstance(split := n.attrs[0], Split) or not isinstance(index := n.attrs[1], int):
        return None
    a = n.args[0]
    if split == ADJACENT or a.op not in (ops.MUL, ops.ADD, ops.SUB):
        return None
    if not split.is_pair or not any(x.type.kind is Kind.TABLE for x in a.args):
        return None
    found = lane(a, split, index, a.type.cols)
    return found if found is not n and found is not None and found.type == n.type else None
