"""A Program: one GEMM and its epilogue, or a finalize or leftover step, closed over named parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from codetta.core.node import Node, postorder
from codetta.core.types import Dim, DType, Kind
from codetta.errors import BlockLocalError, PlanError
from codetta.ir import legal, ops

Role = Literal["epilogue", "finalize", "leftover"]
PARTIAL = {ops.REDUCE, ops.LSE}  # what a tile reduction writes must be folded by a finalize; SELECT writes its answer


@dataclass(frozen=True, slots=True)
class Gemm:
    """The GEMM before an epilogue: "nt" x @ w.T, "nn" x @ w, "tn" dz.T @ x, over ``k``, operands in ``dtype``."""

    form: str
    k: Dim
    dtype: DType


@dataclass(frozen=True, slots=True)
class Program:
    """Named outputs as expressions over parameters, which are INPUT nodes. An epilogue's first parameter is ``acc``.

    ``gemm`` is None for a finalize, a leftover, and for an epilogue written by hand that is not yet bound to a GEMM.
    Programs with the same text are equal."""

    name: str
    role: Role
    params: tuple[Node, ...]
    outputs: tuple[tuple[str, Node], ...]
    gemm: Gemm | None = None

    def __post_init__(self) -> None:
        """Check the block-local rule (BlockLocalError) and that the program is well formed (PlanError)."""
        problem = _malformed(self)
        if problem is not None:
            raise PlanError(f"{self.name}: {problem}")
        loose = {n for n in self.body if n.op is ops.INPUT} - set(self.params)
        if loose:
            raise PlanError(f"{self.name}: the body reads {sorted(str(n.attrs[0]) for n in loose)}, no parameters")
        roots = [n for _, n in self.outputs]
        found = legal.why_not(self.role, roots, self.params[0] if self.role == "epilogue" else None)
        if found is not None:
            raise BlockLocalError(f"{self.name}: {found.reason}", where=found.where, hint=found.hint)

    @property
    def body(self) -> list[Node]:
        """Every node of the outputs, arguments first."""
        return postorder(n for _, n in self.outputs)

    @property
    def is_trivial(self) -> bool:
        """An epilogue that only stores the accumulator, cast to the storage dtype."""
        values = [n.args[0] if n.op is ops.CAST else n for _, n in self.outputs]
        return self.role == "epilogue" and values == [self.params[0]]


def param_name(p: Node) -> str:
    """The name of an INPUT node."""
    return str(p.attrs[0])


def _malformed(p: Program) -> str | None:
    if any(n.op is not ops.INPUT for n in p.params):
        return f"parameters are inputs, not {list(p.params)}"
    names = [param_name(n) for n in p.params]
    outputs = [name for name, _ in p.outputs]
    if p.role == "epilogue" and (names[:1] != ["acc"] or p.params[0].type.kind is not Kind.TILE):
        return f"an epilogue's first parameter is `acc`, a Tile, not {p.params[:1]}"
    if p.role != "epilogue" and p.gemm is not None:
        return f"a {p.role} has no GEMM"
    if len(set(names)) < len(names):
        return f"parameters have different names, not {names}"
    if not outputs or len(set(outputs)) < len(outputs):
        return f"outputs have different names and there is at least one, not {outputs}"
    return None


def is_partial(n: Node) -> bool:
    """Whether an epilogue (or, for sums over rows, a leftover) writes this value one part per tile; what lies inside
    one tile, a group's reduction, is whole."""
    return n.op in PARTIAL and n.args[0].type.kind is Kind.TILE and legal.crosses("epilogue", n)
