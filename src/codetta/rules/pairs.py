"""Pairs of lanes: a join moves towards the store, so that an epilogue works lane by lane."""

from __future__ import annotations

from codetta.core.node import Node, node
from codetta.core.rewrite import Registry
from codetta.core.types import Kind, table
from codetta.ir import ops
from codetta.ir.build import add, const, input_, join, mul, neg, part, sum_row
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
    found = next((a for a in n.args if a.op is ops.JOIN and a.type.cols == n.type.cols), None)
    if found is None or not isinstance(split := found.attrs[0], Split):
        return None
    if any(a.type.kind is Kind.GROUPVEC for a in n.args):
        return None
    lanes = [_map(n, [lane(a, split, i) for a in n.args]) for i in range(split.parts)]
    if all(is_const(x) for x in lanes):
        return None
    joined = node(ops.JOIN, *lanes, attrs=(split,), where=n.where)
    return joined if joined.type == n.type else None


def _map(n: Node, args: list[Node]) -> Node:
    """``n``'s op on one lane; zeros stay the number zero where the op keeps them so."""
    zero = [is_number(a, 0) for a in args]
    if any(zero) and (n.op in (ops.MUL, ops.NEG) or all(zero)) and n.op in (ops.MUL, ops.NEG, ops.ADD, ops.SUB):
        return const(0.0)
    if n.op is ops.ADD and any(zero):
        return args[0] if zero[1] else args[1]
    return rebuilt(n, *args)


def lane(a: Node, split: Split, index: int) -> Node:
    """Lane ``index`` of an operand, taken as deep inside as it is not yet stored or scaled by row."""
    if a.op is ops.JOIN and a.attrs[0] == split:
        return a.args[index]
    if a.type.kind in (Kind.COLVEC, Kind.SCALAR):
        return a
    if a.type.kind is Kind.TABLE and not split.adjacent:
        return part(a, Split(1, split.parts, split.sizes), index)
    if a.op in (ops.MUL, ops.ADD, ops.SUB, ops.NEG) and any(x.type.kind is Kind.TABLE for x in a.args):
        return rebuilt(a, *(lane(x, split, index) for x in a.args))
    return part(a, split, index)


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
    found = rebuilt(a, *(lane(x, split, index) for x in a.args))
    return found if found.type == n.type else None
