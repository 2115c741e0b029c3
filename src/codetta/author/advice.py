"""What to write where a program is right, but no single kernel: its epilogue runs as a second pass over memory."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from codetta.core.node import Node, postorder
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
    found = [_dtype(name, n) or _lane(name, n) or _lane_sum(program, n) for name, n in program.outputs]
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
    if n.op is not ops.REDUCE or not isinstance(n.attrs[1], Kind) or not _splits(n.args[0]):
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


def _lane_sum(program: Program, n: Node) -> Advice | None:
    """A sum over the row of one lane, in a kernel that stores whole rows: it sums over whole rows too."""
    if n.op is not ops.REDUCE or n.attrs[:2] != ("sum", Kind.COLVEC) or not (splits := _splits(n.args[0])):
        return None
    width = program.params[0].type.cols
    if not any(o.type.kind is Kind.TILE and o.type.cols == width for _, o in program.outputs):
        return None
    groups = f", groups={splits[0].groups}" if splits[0].groups > 1 else ""
    join = "join_adjacent" if splits[0].adjacent else "join_halves"

    def change(x: ast.expr) -> ast.expr | None:
        match x:
            case ast.Call(func=ast.Name(id="sum_row"), args=[summed]):
                return ast.parse(f"sum_row({join}({ast.unparse(summed)}, 0.0{groups}))", mode="eval").body
        return None

    reason = "sum_row of one lane, or of lanes added: this kernel stores whole rows, and sums over whole rows"
    return Advice(n.where, reason, corrected(n.where, change) or f"sum_row({join}(left, right{groups}))")


def _splits(n: Node) -> list[Split]:
    """The pairs of which a Tile is one lane, or made of lanes."""
    made_of = postorder([n], stop=lambda m: m.op in (ops.PART, ops.JOIN) or m.type.kind is not Kind.TILE)
    lanes = [m.attrs[0] for m in made_of if m.op is ops.PART and m.type.kind is Kind.TILE]
    return [s for s in lanes if isinstance(s, Split) and s.is_pair]
