"""Row-wise inner products <cotangent, value>, taken where the value is stored: a linear map may move across them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from codetta.core.node import Node
from codetta.core.types import Kind
from codetta.ir import ops
from codetta.ir.build import add, mul, sub, sum_row

if TYPE_CHECKING:
    from codetta.autodiff.reverse import Reverse


def inner_product(walk: Reverse, m: Node) -> Node:
    """The ColVec <cotangent of m, m>, of which each row is one number.

    If m reaches the outputs through a linear map A only, <A^T g, m> = <g, A m>: the outputs and their incoming
    gradients give it, and m itself need not be stored (RoPE: the rotated q and k serve). If all m does is to have a
    bias b added, <g, m> = <g, m + b> - <g, b>."""
    found = _at_outputs(walk, m)
    if found is not None:
        return found
    after = walk.users.get(m, [])
    if len(after) == 1 and m not in walk.external and after[0].op is ops.ADD:
        z = after[0]
        other = z.args[1] if z.args[0] is m else z.args[0]
        if other.type.kind is Kind.ROWVEC and z.type.kind is Kind.TILE:
            return sub(inner_product(walk, z), sum_row(mul(walk.cotangent[z], other)))
    return sum_row(mul(walk.cotangent[m], m))


def _at_outputs(walk: Reverse, m: Node) -> Node | None:
    """The inner product summed over the outputs that depend on m linearly, or None if something else does."""
    linear = {m}
    for n in walk.order:
        if n is m or not any(a in linear for a in n.args):
            continue
        if not _is_linear(n, linear):
            return None
        linear.add(n)
    ends = [n for n in walk.order if n in linear and n in walk.external and n is not m]
    if not ends or any(n.type.kind is not Kind.TILE for n in ends) or m in walk.external:
        return None
    # an output that feeds another output would be counted twice by its stored value
    if any(not _is_end(walk, n) for n in ends):
        return None
    terms = [sum_row(mul(walk.external[n], walk.kept.get(n, n))) for n in ends]
    total = terms[0]
    for t in terms[1:]:
        total = add(total, t)
    return total


def _is_end(walk: Reverse, n: Node) -> bool:
    return not walk.users[n]


def _is_linear(n: Node, linear: set[Node]) -> bool:
    """Whether ``n`` is linear and homogeneous in the nodes of ``linear`` together."""
    hit = [a in linear for a in n.args]
    if n.op in (ops.NEG, ops.CAST, ops.PART, ops.EXPAND):
        return n.type.dtype.is_float
    if n.op is ops.MUL:
        return sum(hit) == 1
    if n.op is ops.DIV:
        return hit == [True, False]
    if n.op in (ops.ADD, ops.SUB, ops.JOIN):
        return all(h or _is_zero(a) for a, h in zip(n.args, hit, strict=True))
    return n.op is ops.WHERE and not hit[0] and all(h or _is_zero(a) for a, h in zip(n.args[1:], hit[1:], strict=True))


def _is_zero(n: Node) -> bool:
    return n.op is ops.CONST and n.attrs[0] == 0
