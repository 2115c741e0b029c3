"""One element of an integer or boolean tensor, as an expression over its position: what a mask's data must be.

``Reader.element(node, index)`` follows arange, comparisons, indexing and the like, symbolically. What it does not
understand becomes an opaque ``Load``, so it can fail to prove something but never prove something false.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Axis:
    """The position along output axis ``number``: an integer from 0 on."""

    number: int


@dataclass(frozen=True, slots=True)
class Load:
    """The element of ``node`` at ``index``, about which nothing is known."""

    node: Node
    index: "Index"


@dataclass(frozen=True, slots=True)
class Linear:
    """An integer: a sum of atoms times coefficients, plus a constant."""

    terms: frozenset[tuple[Axis | Load, int]] = frozenset()
    constant: int = 0


@dataclass(frozen=True, slots=True)
class Holds:
    """``value <= 0`` or ``value == 0`` or ``value != 0``."""

    value: Linear
    relation: str


@dataclass(frozen=True, slots=True)
class All:
    """A boolean: all ``conjuncts`` hold. A bare ``Load`` is the truth of an element."""

    conjuncts: frozenset[Holds | Load] = frozenset()


@dataclass(frozen=True, slots=True)
class Number:
    """A constant float."""

    value: float


@dataclass(frozen=True, slots=True)
class Bias:
    """A float that is 0 where ``allowed`` holds and so low elsewhere that softmax gives exactly 0."""

    allowed: All


Index: TypeAlias = tuple[Linear, ...]
Value: TypeAlias = Linear | All | Number | Bias | Load

TRUE = All()
FALSE = All(frozenset({Holds(Linear(constant=1), "<=")}))
ZERO = Linear()


def linear(atom: Axis | Load, offset: int = 0) -> Linear:
    """``atom + offset``."""
    return Linear(frozenset({(atom, 1)}), offset)


def combine(a: Linear, b: Linear, factor: int = 1) -> Linear:
    """``a + factor * b``."""
    terms = dict(a.terms)
    for atom, coefficient in b.terms:
        terms[atom] = terms.get(atom, 0) + factor * coefficient
    return Linear(frozenset((t, c) for t, c in terms.items() if c), a.constant + factor * b.constant)


def holds(value: Linear, relation: str) -> All:
    """The truth of ``value <relation> 0``, decided where ``value`` is constant or an axis decides its sign."""
    if not value.terms:
        truth = {"<=": value.constant <= 0, "==": value.constant == 0, "!=": value.constant != 0}[relation]
        return TRUE if truth else FALSE
    if relation == "<=" and is_natural(combine(ZERO, value, -1)):
        return TRUE
    if is_natural(combine(value, Linear(constant=-1))):
        return TRUE if relation == "!=" else FALSE
    return All(frozenset({Holds(value, relation)}))


def negate(value: All) -> All | None:
    """The opposite of a boolean, where it is a single comparison."""
    if value in (TRUE, FALSE):
        return FALSE if value == TRUE else TRUE
    match list(value.conjuncts):
        case [Holds(value=v, relation="<=")]:
            return holds(combine(Linear(constant=1), v, -1), "<=")
        case [Holds(value=v, relation="==" | "!=" as relation)]:
            return holds(v, "!=" if relation == "==" else "==")
    return None


def is_natural(value: Linear) -> bool:
    """Whether an integer is certainly not negative, so that indexing with it does not count from the end."""
    return value.constant >= 0 and all(isinstance(a, Axis) and c > 0 for a, c in value.terms)


@dataclass(slots=True)
class Reader:
    """Reads by ``rules``, one an operator, and remembers; ``fresh`` numbers axes that belong to no output."""

    rules: "Mapping[Any, Rule]"
    known: dict[tuple[Node, Index], Value] = field(default_factory=dict)
    fresh: count = field(default_factory=lambda: count(1000))  # type: ignore[type-arg]

    def element(self, node: Node, index: Index) -> Value:
        """The element of ``node`` at ``index``; something opaque if no rule understands it."""
        key = (node, index)
        if key not in self.known:
            rule = self.rules.get(node.target)
            found = rule(self, node, index) if rule and node.op == "call_function" else None
            self.known[key] = opaque(node, index) if found is None else found
        return self.known[key]

    def operand(self, node: Node, position: int, index: Index) -> Value | None:
        """The element of an operand that is broadcast to the shape of ``node``; also a plain number."""
        given = node.args[position] if position < len(node.args) else None
        if isinstance(given, bool):
            return TRUE if given else FALSE
        if isinstance(given, int):
            return Linear(constant=given)
        if isinstance(given, float):
            return Number(given)
        if not isinstance(given, Node):
            return None
        aligned = broadcast(given, node, index)
        return None if aligned is None else self.element(given, aligned)


Rule: TypeAlias = Callable[[Reader, Node, Index], Value | None]


def opaque(node: Node, index: Index) -> Value:
    """An element of which only the place is known."""
    load = Load(node, index)
    dtype = dtype_of(node)
    if dtype is torch.bool:
        return All(frozenset({load}))
    return load if dtype is not None and (dtype.is_floating_point or dtype.is_complex) else linear(load)


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a tensor's node."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def shape_of(node: Node) -> tuple[Any, ...]:
    """The sizes of a tensor's node, possibly symbolic."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def broadcast(source: Node, target: Node, index: Index) -> Index | None:
    """``index`` into ``target``, as an index into the tensor that is broadcast to it; ``None`` if sizes are unclear."""
    return align(shape_of(source), shape_of(target), index)


def align(inner: tuple[Any, ...], outer: tuple[Any, ...], index: Index) -> Index | None:
    """The same for shapes."""
    result: list[Linear] = []
    for size, whole, position in zip(reversed(inner), reversed(outer), reversed(index), strict=False):
        if statically_known_true(size == whole):
            result.append(ZERO if statically_known_true(size == 1) else position)
        elif statically_known_true(size == 1):
            result.append(ZERO)
        else:
            return None
    return tuple(reversed(result))
