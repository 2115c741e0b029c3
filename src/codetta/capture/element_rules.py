"""How each operator's element follows from elements of its operands: the table that ``elements.Reader`` reads."""

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from codetta.capture.elements import (
    FALSE,
    TRUE,
    ZERO,
    All,
    Axis,
    Bias,
    Index,
    Linear,
    Load,
    Number,
    Reader,
    Rule,
    Value,
    align,
    combine,
    dtype_of,
    holds,
    is_natural,
    linear,
    negate,
    shape_of,
)

aten = torch.ops.aten


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _source(node: Node) -> Node:
    source = node.args[0]
    if not isinstance(source, Node):
        raise TypeError(f"{node.target} has no tensor as its first argument")
    return source


def _same(reader: Reader, node: Node, index: Index) -> Value | None:
    return reader.element(_source(node), index)


def _arange(reader: Reader, node: Node, index: Index) -> Value | None:
    integers = dtype_of(node) in (torch.int64, torch.int32)
    if not integers or node.target is aten.arange.default:
        return index[0] if integers else None
    start, step = node.args[0], _argument(node, 2, "step", 1)
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return combine(Linear(constant=start), index[0], step)


def _constant(value: float, dtype: torch.dtype | None) -> Value | None:
    if dtype is None or dtype.is_complex:
        return None
    if dtype is torch.bool:
        return TRUE if value else FALSE
    return Number(float(value)) if dtype.is_floating_point else Linear(constant=int(value))


def _ones(reader: Reader, node: Node, index: Index) -> Value | None:
    return _constant(1, dtype_of(node))


def _zeros(reader: Reader, node: Node, index: Index) -> Value | None:
    return _constant(0, dtype_of(node))


def _full(position: int) -> Rule:
    def rule(reader: Reader, node: Node, index: Index) -> Value | None:
        value = _argument(node, position, "fill_value")
        return _constant(value, dtype_of(node)) if isinstance(value, (int, float)) else None

    return rule


def _sum(sign: int) -> Rule:
    def rule(reader: Reader, node: Node, index: Index) -> Value | None:
        a, b = reader.operand(node, 0, index), reader.operand(node, 1, index)
        alpha = _argument(node, 2, "alpha", 1)
        if not isinstance(a, Linear) or not isinstance(b, Linear) or not isinstance(alpha, int):
            return None
        return combine(a, b, sign * alpha)

    return rule


def _times(reader: Reader, node: Node, index: Index) -> Value | None:
    a, b = reader.operand(node, 0, index), reader.operand(node, 1, index)
    if isinstance(a, All) and isinstance(b, All):
        return All(a.conjuncts | b.conjuncts)
    if isinstance(a, Linear) and isinstance(b, Linear) and not (a.terms and b.terms):
        variable, factor = (a, b) if a.terms else (b, a)
        return combine(ZERO, variable, factor.constant)
    return None


def _comparison(relation: str, sign: int, offset: int) -> Rule:
    """``sign * (a - b) + offset <relation> 0``, for integers."""

    def rule(reader: Reader, node: Node, index: Index) -> Value | None:
        a, b = reader.operand(node, 0, index), reader.operand(node, 1, index)
        if not isinstance(a, Linear) or not isinstance(b, Linear):
            return None
        return holds(combine(Linear(constant=offset), combine(a, b, -1), sign), relation)

    return rule


def _and(reader: Reader, node: Node, index: Index) -> Value | None:
    a, b = reader.operand(node, 0, index), reader.operand(node, 1, index)
    return All(a.conjuncts | b.conjuncts) if isinstance(a, All) and isinstance(b, All) else None


def _or(reader: Reader, node: Node, index: Index) -> Value | None:
    a, b = reader.operand(node, 0, index), reader.operand(node, 1, index)
    if TRUE in (a, b):
        return TRUE
    if FALSE in (a, b):
        return b if a == FALSE else a
    return None


def _not(reader: Reader, node: Node, index: Index) -> Value | None:
    value = reader.element(_source(node), index)
    return negate(value) if isinstance(value, All) else None


def _cast(reader: Reader, node: Node, index: Index) -> Value | None:
    value, dtype = reader.element(_source(node), index), dtype_of(node)
    if dtype is None:
        return None
    before = dtype_of(_source(node))
    if dtype is before or (dtype.is_floating_point and isinstance(value, (Number, Bias))):
        return value
    if dtype is torch.bool and isinstance(value, Linear):
        match list(value.terms):
            case [(Load() as load, 1)] if value.constant == 0:
                return All(frozenset({load}))
        return holds(value, "!=")
    if value in (TRUE, FALSE):
        return _constant(value == TRUE, dtype)
    wide = dtype is torch.int64 or (dtype is torch.int32 and before is torch.int32)
    return value if wide and isinstance(value, Linear) else None


def _unsqueeze(reader: Reader, node: Node, index: Index) -> Value | None:
    dim = int(_argument(node, 1, "dim")) % len(index)
    return reader.element(_source(node), index[:dim] + index[dim + 1 :])


def _expand(reader: Reader, node: Node, index: Index) -> Value | None:
    return reader.operand(node, 0, index)


def _slice(reader: Reader, node: Node, index: Index) -> Value | None:
    dim = int(_argument(node, 1, "dim", 0)) % len(index)
    start, step = _argument(node, 2, "start"), _argument(node, 4, "step", 1)
    start = 0 if start is None else start
    if not isinstance(start, int) or start < 0 or not isinstance(step, int):
        return None
    moved = combine(Linear(constant=start), index[dim], step)
    return reader.element(_source(node), (*index[:dim], moved, *index[dim + 1 :]))


def _select(reader: Reader, node: Node, index: Index) -> Value | None:
    rank, place = len(shape_of(_source(node))), _argument(node, 2, "index")
    dim = int(_argument(node, 1, "dim")) % rank
    if not isinstance(place, int) or place < 0:
        return None
    return reader.element(_source(node), (*index[:dim], Linear(constant=place), *index[dim:]))


def _permuted(reader: Reader, node: Node, index: Index) -> Value | None:
    rank = len(index)
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [int(d) % rank for d in _argument(node, 1, "dims")]
    elif rank > 1:
        dims = (_argument(node, 1, "dim0"), _argument(node, 2, "dim1")) if len(node.args) > 1 else (-2, -1)
        a, b = (int(d) % rank for d in dims)
        order[a], order[b] = order[b], order[a]
    place = {source: axis for axis, source in enumerate(order)}
    return reader.element(_source(node), tuple(index[place[d]] for d in range(rank)))


def _reshape(reader: Reader, node: Node, index: Index) -> Value | None:
    """Only where axes of size one come or go."""
    before, after = shape_of(_source(node)), shape_of(node)
    kept = [(size, i) for size, i in zip(after, index, strict=True) if not statically_known_true(size == 1)]
    result: list[Linear] = []
    for size in before:
        if statically_known_true(size == 1):
            result.append(ZERO)
        elif kept and statically_known_true(kept[0][0] == size):
            result.append(kept.pop(0)[1])
        else:
            return None
    return None if kept else reader.element(_source(node), tuple(result))


def _index(reader: Reader, node: Node, index: Index) -> Value | None:
    """Indexing the leading axes by integer tensors that are certainly not negative."""
    source, given = _source(node), node.args[1]
    chosen = [i for i in given if isinstance(i, Node)] if isinstance(given, (list, tuple)) else []
    if not isinstance(given, (list, tuple)) or len(chosen) != len(given):
        return None
    tail = len(shape_of(source)) - len(chosen)
    if tail < 0:
        return None
    head = len(index) - tail
    places: list[Linear] = []
    for tensor in chosen:
        aligned = align(shape_of(tensor), shape_of(node)[:head], index[:head])
        place = None if aligned is None else reader.element(tensor, aligned)
        if not isinstance(place, Linear):
            return None
        places.append(place)
    where = (*places, *index[head:])
    if all(is_natural(p) for p in places):
        return reader.element(source, where)
    return All(frozenset({Load(source, where)})) if dtype_of(source) is torch.bool else None


def _diff(reader: Reader, node: Node, index: Index) -> Value | None:
    """A first difference that is the same number everywhere, also against what was put in front."""
    order, front, back = _argument(node, 1, "n", 1), _argument(node, 3, "prepend"), _argument(node, 4, "append")
    dim = int(_argument(node, 2, "dim", -1)) % len(index)
    if order != 1 or not isinstance(front, Node) or back is not None:
        return None
    if not statically_known_true(shape_of(front)[dim] == 1):
        return None

    def at(source: Node, place: Linear) -> Value:
        return reader.element(source, (*index[:dim], place, *index[dim + 1 :]))

    here = linear(Axis(next(reader.fresh)))
    pairs = (
        (at(_source(node), here), at(_source(node), combine(here, Linear(constant=-1)))),
        (at(_source(node), ZERO), at(front, ZERO)),
    )
    steps = {combine(a, b, -1) for a, b in pairs if isinstance(a, Linear) and isinstance(b, Linear)}
    constant = len(steps) == 1 and all(isinstance(v, Linear) for pair in pairs for v in pair)
    step = next(iter(steps), ZERO)
    return step if constant and not step.terms else None


def _cumsum(reader: Reader, node: Node, index: Index) -> Value | None:
    """A running sum of a constant: so many times the constant."""
    dim = int(_argument(node, 1, "dim")) % len(index)
    anywhere = linear(Axis(next(reader.fresh)))
    value = reader.element(_source(node), (*index[:dim], anywhere, *index[dim + 1 :]))
    if value in (TRUE, FALSE):
        value = Linear(constant=int(value == TRUE))
    if not isinstance(value, Linear) or value.terms or dtype_of(node) is not torch.int64:
        return None
    return combine(Linear(constant=value.constant), index[dim], value.constant)


def _triangle(sign: int) -> Rule:
    """``tril`` (``sign`` 1) keeps the elements with column - row - diagonal <= 0, ``triu`` the others and that one."""

    def rule(reader: Reader, node: Node, index: Index) -> Value | None:
        value, diagonal = reader.element(_source(node), index), _argument(node, 1, "diagonal", 0)
        if not isinstance(diagonal, int):
            return None
        offset = combine(combine(index[-1], index[-2], -1), Linear(constant=-diagonal))
        kept = holds(combine(ZERO, offset, sign), "<=")
        if isinstance(value, All):
            return All(value.conjuncts | kept.conjuncts)
        return _bias(kept, value, Number(0.0), dtype_of(node))

    return rule


def _where(reader: Reader, node: Node, index: Index) -> Value | None:
    condition, a, b = (reader.operand(node, i, index) for i in range(3))
    return _bias(condition, a, b, dtype_of(node))


def _masked_fill(reader: Reader, node: Node, index: Index) -> Value | None:
    other, condition, filled = (reader.operand(node, i, index) for i in range(3))
    return _bias(condition, filled, other, dtype_of(node))


def _bias(condition: Value | None, yes: Value | None, no: Value | None, dtype: torch.dtype | None) -> Value | None:
    """A float that is 0 on one side of a condition and lowest on the other."""
    if not isinstance(condition, All) or dtype is None or not dtype.is_floating_point:
        return None
    if not isinstance(yes, Number) or not isinstance(no, Number):
        return None
    # The lowest half is near enough to real scores that a sum with one may not vanish.
    lowest = float("-inf") if dtype is torch.float16 else torch.finfo(dtype).min
    if yes.value == 0 and no.value <= lowest:
        return Bias(condition)
    allowed = negate(condition)
    return Bias(allowed) if no.value == 0 and yes.value <= lowest and allowed is not None else None


_COMPARISONS: dict[str, Rule] = {
    "le": _comparison("<=", 1, 0),
    "lt": _comparison("<=", 1, 1),
    "ge": _comparison("<=", -1, 0),
    "gt": _comparison("<=", -1, 1),
    "eq": _comparison("==", 1, 0),
    "ne": _comparison("!=", 1, 0),
}

RULES: dict[Any, Rule] = (
    {getattr(getattr(aten, name), kind): rule for name, rule in _COMPARISONS.items() for kind in ("Tensor", "Scalar")}
    | dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), _ones)
    | dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), _zeros)
    | dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange)
    | dict.fromkeys((aten.full.default, aten.full_like.default), _full(1))
    | dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum(1))
    | dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sum(-1))
    | dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _times)
    | dict.fromkeys((aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default), _and)
    | dict.fromkeys((aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default), _or)
    | dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _not)
    | dict.fromkeys((aten.view.default, aten.reshape.default, aten.squeeze.default, aten.squeeze.dim), _reshape)
    | dict.fromkeys((aten.t.default, aten.mT.default, aten.transpose.int, aten.permute.default), _permuted)
    | dict.fromkeys((aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default), _same)
    | dict.fromkeys((aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf), _where)
    | {
        aten.cumsum.default: _cumsum,
        aten.diff.default: _diff,
        aten.expand.default: _expand,
        aten.index.Tensor: _index,
        aten.masked_fill.Scalar: _masked_fill,
        aten.new_full.default: _full(2),
        aten.scalar_tensor.default: _full(0),
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        aten.to.dtype: _cast,
        aten.tril.default: _triangle(1),
        aten.triu.default: _triangle(-1),
        aten.unsqueeze.default: _unsqueeze,
    }
)
