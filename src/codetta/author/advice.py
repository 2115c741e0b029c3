"""What to write where a program is right, but no single kernel: its epilogue runs as a second pass over memory."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from codetta.core.node import Node
from codetta.core.types import Kind
from codetta.errors import SourceLine
from codetta.ir import ops
from codetta.ir.program import Program
from codetta.ir.split import Split
from codetta.lang.expression import TARGET_NAMES
from codetta.lang.teach import corrected

STORED = ("f32", "bf16", "f16")  # what a kernel stores of a Tile


@dataclass(frozen=True, slots=True)
class Advice:
    """The line that keeps a program from being one kernel, why, and a line that would not."""

    where: SourceLine | None
    reason: str
    write: str


def advice(program: Program) -> Advice | None:
    """What can be said about a program as its author wrote it; None where the reason alone must do."""
    found = [_dtype(name, n) or _lane(name, n) for name, n in program.outputs]
    return next(filter(None, [*found, *(_lane("", n) for n in program.body)]), None)


def _dtype(name: str, n: Node) -> Advice | None:
    """A Tile stored in a dtype that kernels do not store."""
    if n.type.kind is not Kind.TILE or n.type.dtype.name in STORED:
        return None
    value = f"where({name}, 1.0, 0.0)" if n.type.dtype.name == "boolean" else f"to({name}, bf16)"
    reason = f"{name} is stored as {n.type.dtype}; a kernel stores Tiles as {', '.join(STORED)}"
    return Advice(n.where, reason, f"return dict(..., {name}={value})")


def _lane(name: str, n: Node) -> Advice | None:
    """A reduction of one lane of a pair, where only the whole is at hand in one thread."""
    if n.op is not ops.REDUCE or not isinstance(n.attrs[1], Kind) or not _is_lane(n.args[0]):
        return None
    call, to = f"{n.attrs[0]}_{TARGET_NAMES[n.attrs[1]]}", n.attrs[1]
    if to is Kind.GROUPVEC:

        def change(x: ast.expr) -> ast.expr | None:
            match x:
                case ast.Call(func=ast.Name(id=name), args=[reduced]) if name == call:
                    whole = ast.parse(ast.unparse(reduced), mode="eval").body
                    for part in (p for p in ast.walk(whole) if isinstance(p, ast.Name)):
                        part.id = "acc"
                    return ast.Call(x.func, [whole], x.keywords)
            return None

        reason = f"{call} takes one lane of each head; inside a kernel a head is reduced whole, before it is parted"
        return Advice(n.where, reason, corrected(n.where, change) or f"{call}(acc, groups={n.attrs[2]})")
    if to is not Kind.ROWVEC:
        return None
    reason = f"{call} of one lane: the lanes lie interleaved in a kernel, and columns are summed where they lie"
    stored = name or "sums"
    write = f"@leftover  # over y, once it is stored\ndef after(y: Tile):\n    return dict({stored}={call}(y))"
    return Advice(n.where, reason, write)


def _is_lane(n: Node) -> bool:
    """Whether a Tile is one lane of a pair, or made of lanes."""
    if n.op is ops.PART and isinstance(split := n.attrs[0], Split):
        return split.is_pair
    return n.op is not ops.JOIN and n.type.kind is Kind.TILE and any(_is_lane(a) for a in n.args)
