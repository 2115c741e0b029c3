"""The way round the block-local rule, as code: what to store here, and the step that uses it when it is whole."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from codetta.core.node import Node, postorder
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
    return _inside(found.node, crossing, names) or _deferred(found.node, crossing, name, names, where)


def _inside(n: Node, crossing: Node, names: Names) -> str | None:
    """A factor per row of a row's sum, or of its value at a column: taken inside, nothing waits for the whole row."""
    linear = crossing.op is ops.SELECT or (crossing.op is ops.REDUCE and crossing.attrs[0] == "sum")
    if n.op is not ops.MUL or not linear:
        return None
    factor = n.args[1] if n.args[0] is crossing else n.args[0]
    if factor is crossing or factor.type.kind is not crossing.type.kind:
        return None
    reduced = crossing.args[0]
    x, r = (_name(a, names) or _spelled(a, names) for a in (reduced, factor))
    scaled = f"{x if x.isidentifier() else f'({x})'} * {r if r.isidentifier() else f'({r})'}"
    made = _spelled(crossing, names, {reduced: scaled})
    partial = names.get(n) or FALLBACK.get(crossing.type.kind, "partial")
    return f"return dict(..., {partial}={made})  # a factor per row or column goes inside"


def _deferred(n: Node, crossing: Node, name: str, names: Names, where: SourceLine) -> str:
    """The reduction stored, then a finalize where a vector is made of it, then the next program where a tile is."""
    partial = names.get(crossing) or FALLBACK.get(crossing.type.kind, "partial")
    made, kind = _spelled(crossing, names), crossing.type.kind.value
    line = _with_name(where, made, partial)
    here = f"return dict(..., {partial}={partial if crossing in names else made})"
    if n.type.kind is Kind.TILE:
        return f"{here}\n# and in the next program, def after_{name}(acc: Tile, {partial}: {kind}):\n{line}"
    assigned, _, body = line.partition(" = ")
    if not (body and assigned.isidentifier()):
        assigned, body = names.get(n, partial), _spelled(n, {**names, crossing: partial})
    taken = "".join(f", {v}: {k}" for v, k in _vectors(n, crossing, names))
    return f"{here}\n@finalize\ndef after_{name}({partial}: {kind}{taken}):\n    return dict({assigned}={body})"


def _vectors(n: Node, crossing: Node, names: Names) -> list[tuple[str, str]]:
    """The other vectors of which a value is made, by name, with their kinds."""

    def ends(m: Node) -> bool:
        return m is crossing or m.op is ops.INPUT or (m in names and m is not n)

    found = [m for m in postorder([n], stop=ends) if ends(m) and m is not crossing and m.type.kind is not Kind.TILE]
    return [(name, m.type.kind.value) for m in found if (name := _name(m, names))]


def _name(n: Node, names: Names) -> str | None:
    """What a parameter, or a value that the program names, is called."""
    return param_name(n) if n.op is ops.INPUT else names.get(n)


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


def _spelled(n: Node, names: Names, instead: Names | None = None) -> str:
    """A value as an expression of what has a name; ``instead`` is written for some values, parameters too."""

    def operand(a: Node) -> Text:
        if instead is not None and a in instead:
            return Text(instead[a], ATOM)
        if a.op is ops.INPUT:
            return Text(param_name(a), ATOM)
        return Text(names[a], ATOM) if a in names else expression(a, operand)

    return expression(n, operand).text
