"""The parts that generated text is made of: nested scopes of lines, and the places at which a value is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from codetta.backends.hopper.rows.index import Digits, identity
from codetta.core.types import DType

Shape = tuple[str, str]
ONE: Shape = ("1", "1")


@dataclass(eq=False)
class Scope:
    """Lines of one nesting level, with the names they give to expressions; what is named outside is seen inside."""

    parent: Scope | None = None
    lines: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    values: dict[object, Value] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """How many scopes lie around this one."""
        return 0 if self.parent is None else self.parent.depth + 1

    def outwards(self) -> Iterator[Scope]:
        """This scope and those around it."""
        yield self
        if self.parent is not None:
            yield from self.parent.outwards()

    def name_of(self, text: str) -> str | None:
        """The name that already holds this expression."""
        return next((s.named[text] for s in self.outwards() if text in s.named), None)

    def value_at(self, key: object) -> Value | None:
        """The value that was already computed under this key."""
        return next((s.values[key] for s in self.outwards() if key in s.values), None)

    @contextmanager
    def nested(self, head: str) -> Iterator[Scope]:
        """A statement with a body; it joins this scope's lines when the body is complete."""
        inside = Scope(self)
        yield inside
        self.lines += [head, *(f"    {line}" for line in inside.lines or ["pass"])]


@dataclass(frozen=True, slots=True)
class Value:
    """An expression's name (or number) in the text, and the dtype it has."""

    text: str
    dtype: DType
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Base:
    """A variable that runs over columns. In a loop over groups ``width`` is the group's, and ``high`` and ``low``
    name the two digits."""

    name: str
    extent: int
    scope: Scope
    shape: Shape
    width: int = 0
    high: str = ""
    low: str = ""


@dataclass(frozen=True, slots=True)
class Col:
    """The columns at which a value is computed, and which of them exist."""

    base: Base
    digits: Digits
    mask: str | None = None

    @property
    def scope(self) -> Scope:
        """Where these columns are known."""
        return self.base.scope

    @property
    def is_single(self) -> bool:
        """One column for the whole block: a group's, in a loop over groups."""
        d = self.digits
        return d.inner == 0 and d.width in (d.extent, self.base.width)

    @property
    def load_mask(self) -> str | None:
        """The mask of a load or a store; what is a single column exists."""
        return None if self.is_single else self.mask


@dataclass(frozen=True, slots=True)
class Row:
    """The rows at which a value is computed, as an expression in int64, and which of them exist."""

    text: str
    scope: Scope
    shape: Shape
    mask: str | None = None


def column(name: str, extent: int, scope: Scope, shape: Shape, mask: str | None = None) -> Col:
    """A variable's own columns."""
    return Col(Base(name, extent, scope, shape), identity(extent), mask)


def at(col: Col, digits: Digits) -> Col:
    """Other columns of the same variable."""
    return replace(col, digits=digits)


def joint(a: Shape, b: Shape) -> Shape:
    """The shape to which two blocks broadcast."""
    return (a[0] if b[0] == "1" else b[0], a[1] if b[1] == "1" else b[1])


def both(a: str | None, b: str | None) -> str | None:
    """The conjunction of two masks, where None lets everything pass."""
    if a is None or b is None or a == b:
        return a or b
    return f"{a} & {b}"


def deepest(*scopes: Scope) -> Scope:
    """The innermost of scopes of which each lies inside the other."""
    return max(scopes, key=lambda s: s.depth)
