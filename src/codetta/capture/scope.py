"""What a rule of the ATen table sees: an operator, the meaning of its arguments, and a way to bring others in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import fx

from codetta.capture.align import Value, align, form_of
from codetta.capture.layout import Dims, Size, atoms, natural, shape_of
from codetta.capture.sources import before_casts, before_views, dtype_of, fake
from codetta.core.node import Node
from codetta.core.types import ROWS, DType, Kind, Type
from codetta.errors import UnsupportedError
from codetta.ir.build import Value as Operand
from codetta.ir.build import as_node, cast, sum_row

T = TypeVar("T")
Lane = Literal["", "real", "imag"]


@dataclass(frozen=True, slots=True)
class Pair:
    """An understood complex tensor: its real and its imaginary part."""

    real: Value
    imag: Value


Meaning = Value | Pair | tuple[Value, ...]


class OpaqueArgument(UnsupportedError):
    """Raised by a rule for which an argument must be understood, and is not."""

    def __init__(self, arg: object) -> None:
        super().__init__(f"its argument {arg} stays with PyTorch")
        self.name = str(arg)


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that PyTorch computes; of a complex one, one of the two lanes."""

    source: fx.Node
    lane: Lane = ""


@dataclass(frozen=True, slots=True)
class Border:
    """How an outside tensor enters a segment: as a value of ``type``, its dimensions lying as ``dims`` says.

    Without dimensions it enters as it is: a weight."""

    source: fx.Node
    type: Type
    dims: Dims | None = None
    lane: Lane = ""


class Surroundings(Protocol):
    """What surrounds an operator in translation."""

    def lookup(self, arg: fx.Node) -> Meaning | None:
        """What an argument means here; ``None`` if it comes from outside."""

    def understood(self, arg: fx.Node) -> bool:
        """Whether a node means anything, here or elsewhere."""

    def enter(self, border: Border) -> Node:
        """The INPUT node of a border."""


@dataclass(slots=True)
class Scope:
    """One operator in translation; a rule that makes it a GEMM sets ``contracts``."""

    node: fx.Node
    around: Surroundings
    contracts: bool = False

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the operator's result."""
        return shape_of(fake(self.node))

    @property
    def dtype(self) -> DType:
        """The dtype of the operator's result."""
        return dtype_of(fake(self.node))

    def lookup(self, arg: Any) -> Meaning | None:
        """What an argument means here; ``None`` if it comes from outside or is no tensor."""
        return self.around.lookup(arg) if isinstance(arg, fx.Node) else None

    def value(self, arg: Any) -> Value:
        """The meaning of an argument that must be an understood tensor."""
        found = self.lookup(arg)
        if not isinstance(found, Value):
            raise OpaqueArgument(arg)
        return found

    def activation(self, arg: Any) -> Value:
        """The meaning of an argument; from outside, its last dimension is taken as the columns, the others as rows."""
        found = self.lookup(arg)
        if found is None and isinstance(arg, fx.Node) and fake(arg).dim() >= 2:
            dims = natural(shape_of(fake(arg)))
            form = form_of(shape_of(fake(arg)), dims)
            return Value(self._enter(Outside(arg), form.kind, form.cols, form.dims), dims)
        return self.value(arg)

    def combine(self, fn: Callable[..., Node], *operands: Any) -> Value:
        """``fn`` of the operands' nodes: values, FX nodes, tensors from outside and numbers, broadcast as ATen does."""
        found = [self._operand(x) for x in operands]
        if not any(isinstance(x, (Value, Outside)) for x in found):
            raise UnsupportedError("no operand is a tensor")
        try:
            return self._broadcast(fn, found)
        except UnsupportedError:
            narrow = [_per_row(x) for x in found]
            if narrow == found:
                raise
            return self._broadcast(fn, narrow)

    def _broadcast(self, fn: Callable[..., Node], operands: Sequence[Value | Outside | float]) -> Value:
        known = [x for x in operands if isinstance(x, Value)]
        aligned = align(known, [shape_of(fake(x.source)) for x in operands if isinstance(x, Outside)])
        forms = iter(aligned.newcomers)
        nodes: list[Operand] = []
        for x in operands:
            if isinstance(x, Outside):
                form = next(forms)
                nodes.append(self._enter(x, form.kind, form.cols, form.dims))
            else:
                nodes.append(x.node if isinstance(x, Value) else x)
        return Value(fn(*(as_node(n) for n in nodes)), aligned.dims)

    def weight(self, arg: Any) -> tuple[Node, bool]:
        """The (rows, columns) matrix behind an argument, and whether the argument is its transpose."""
        if not isinstance(arg, fx.Node) or self.lookup(arg) is not None:
            raise UnsupportedError(f"the matrix {arg} is computed in the same segment")
        source, casts, flipped = before_casts(arg, self.around.understood)
        if fake(source).dim() != 2:
            raise UnsupportedError(f"{source.name} is no matrix")
        rows, cols = shape_of(fake(source))
        if not (isinstance(rows, int) and isinstance(cols, int)):
            raise UnsupportedError(f"the matrix {source.name} has no fixed shape")
        found = self.around.enter(Border(source, Type(Kind.TILE, dtype_of(fake(source)), rows, cols)))
        for dtype in casts:
            found = cast(found, dtype)
        return found, flipped

    def complex_lanes(self, arg: Any) -> tuple[Value | Outside, Value | Outside]:
        """The real and the imaginary part of a complex argument."""
        found = self.lookup(arg)
        if isinstance(found, Pair):
            return found.real, found.imag
        if found is not None or not fake(arg).is_complex():
            raise UnsupportedError(f"{arg} is not complex")
        return Outside(arg, "real"), Outside(arg, "imag")

    def as_kind(self, arg: Any, kind: Kind, cols: int | None, dims: Dims) -> Node:
        """An argument whose kind and place the operator itself says; from outside, repeated where it is broadcast."""
        found = self.lookup(arg)
        if found is None:
            self._operand(arg)
            return self._enter(Outside(arg), kind, cols, dims)
        if not isinstance(found, Value) or found.node.type.kind is not kind or found.dims != dims:
            raise UnsupportedError(f"its argument {arg} does not lie as a {kind.value}")
        return found.node

    def _operand(self, x: Any) -> Value | Outside | float | int | bool:
        if isinstance(x, (Value, Outside, float, int, bool)):
            return x
        if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), torch.Tensor):
            raise UnsupportedError(f"the operand {x} is neither a tensor nor a fixed number")
        found = self.lookup(x)
        if found is None and fake(x).device != _device(self.node):
            raise UnsupportedError(f"its input {x.name} is on another device")
        return Outside(x) if found is None else self.value(x)

    def _enter(self, outside: Outside, kind: Kind, cols: int | None, dims: Dims) -> Node:
        value = fake(outside.source)
        dtype = dtype_of(torch.empty((), dtype=value.dtype.to_real())) if outside.lane else dtype_of(value)
        type_ = Type(kind, dtype, ROWS if atoms(dims, "row") else None, cols)
        source, dims = before_views(outside.source, dims, self.around.understood)
        return self.around.enter(Border(source, type_, dims, outside.lane))


def _device(node: fx.Node) -> torch.device:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) else value
    return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")


def _per_row(x: T) -> T | Value:
    """A tile of a single column as one number per row, for use beside values of more columns."""
    if not isinstance(x, Value) or x.node.type.kind is not Kind.TILE or x.node.type.cols != 1:
        return x
    return Value(sum_row(x.node), tuple(tuple(a for a in d if a.axis == "row") for d in x.dims))
