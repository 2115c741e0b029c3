"""The way round the block-local rule, as code: what to store here, and the step that uses it when it is whole."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from codetta.core.node import Node
from codetta.core.types import Kind
from codetta.errors import SourceLine
from codetta.ir import legal, ops
from codetta.ir.program import param_name
from codetta.lang.expression import ATOM, Text, expression
from codetta.lang.teach import corrected, statement

Names = Mapping[Node, str]
FALLBACK = {Kind.COLVEC: "row", Kind.ROWVEC: "column", Kind.SCALAR: "total", Kind.TABLE: "inside"}


def around_the_rule(role: str, found: legal.Violation, name: str, names: Names, where: SourceLine) -> str | None:
    """What to write in the place of a line that breaks the rule."""
    if role == "finalize":
        return None if found.node.op is ops.MATMUL else f"@leftover  # sees whole rows\ndef {name}(...):"
    crossing = next((a for a in found.node.args if legal.crosses(role, a)), None)
    if crossing is None:
        return _in_parts(found.node, names, where) if legal.crosses(role, found.node) is False else None
    return _deferred(found.node, crossing, name, names, where)


def _deferred(n: Node, crossing: Node, name: str, names: Names, where: SourceLine) -> str:
    """The reduction stored, then a finalize where a vector is made of it, then the next program where a tile is."""
    partial = names.get(crossing) or FALLBACK.get(crossing.type.kind, "partial")
    made, kind = _spelled(crossing, names), crossing.type.kind.value
    line = _with_name(where, made, partial)
    here = f"return dict(..., {partial}={partial if crossing in names else made})"
    if n.type.kind is Kind.TILE:
        return f"{here}\n# and in the next program, def after_{name}(acc: Tile, {partial}: {kind}):\n{line}"
    target, _, value = line.partition(" = ")
    assigned = target if value and target.isidentifier() else partial
    body = value or f"{names.get(n) or _spelled(n, {**names, crossing: partial})}"
    return f"{here}\n@finalize\ndef after_{name}({partial}: {kind}):\n    return dict({assigned}={body})"


def _with_name(where: SourceLine, made: str, partial: str) -> str:
    """The line with the reduction read by name."""

    def change(x: ast.expr) -> ast.expr | None:
        return ast.Name(partial) if ast.unparse(x) == made else None

    found = statement(where)
    return corrected(where, change) or (ast.unparse(found) if found is not None else where.text)


def _in_parts(n: Node, names: Names, where: SourceLine) -> str:
    """Two ranges of columns that met: as the lanes of a pair."""
    told = [names[a] for a in n.args if a in names]
    left, right = told if len(told) == 2 else ("left", "right")
    return f"{left}, {right} = halves(acc)  # lanes lie in one tile\n{where.text}"


def _spelled(n: Node, names: Names) -> str:
    def operand(a: Node) -> Text:
        if a.op is ops.INPUT:
            return Text(param_name(a), ATOM)
        return Text(names[a], ATOM) if a in names else expression(a, operand)

    return expression(n, operand).text
