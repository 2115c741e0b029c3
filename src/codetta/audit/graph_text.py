"""A tensor graph as text, so that graphs before and after a pass can be laid side by side: a value keeps its name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from codetta.core.node import Node
from codetta.ir import ops
from codetta.ir.graph import Graph
from codetta.lang.expression import ATOM, Text, expression, type_text

WIDTH = 110
PRODUCT = 7  # how tightly a contraction binds: as * does
FORMS = {"nt": "{} @ {}.T", "nn": "{} @ {}", "tn": "{}.T @ {}"}


@dataclass(slots=True)
class Names:
    """The names of values. Equal values are one node, so that what a pass leaves alone is called the same after it."""

    known: dict[Node, str] = field(default_factory=dict)
    count: int = 0

    def of(self, n: Node) -> str:
        """The name of a value: an input's own, else the next number."""
        if n not in self.known:
            self.count += n.op is not ops.INPUT
            self.known[n] = str(n.attrs[0]) if n.op is ops.INPUT else f"t{self.count}"
        return self.known[n]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a graph's text, and what it is about: a value, or an output by its name."""

    text: str
    about: Node | tuple[str, Node]


def graph_lines(graph: Graph, names: Names) -> list[Line]:
    """Inputs that had no name yet, one statement for each contraction and each value that is used again, outputs."""
    uses = Counter(a for n in graph.nodes for a in n.args) + Counter(graph.roots)
    texts: dict[Node, Text] = {}
    lines = [Line(f"{names.of(n)}: {type_text(n.type)}", n) for n in graph.inputs if n not in names.known]
    for n in graph.nodes:
        texts[n] = Text(names.of(n), ATOM) if n.op is ops.INPUT else _expression(n, texts)
        again = uses[n] > 1 and n.op not in (ops.INPUT, ops.CONST)
        if n.op is ops.MATMUL or again or len(texts[n].text) > WIDTH:
            lines.append(Line(f"{names.of(n)} = {texts[n]}  # {type_text(n.type)}", n))
            texts[n] = Text(names.of(n), ATOM)
    return [*lines, *(Line(f"return {name} = {texts[n]}", (name, n)) for name, n in graph.outputs)]


def _expression(n: Node, texts: dict[Node, Text]) -> Text:
    if n.op is not ops.MATMUL:
        return expression(n, texts.__getitem__)
    operands = (t.text if t.binds == ATOM else f"({t})" for t in (texts[a] for a in n.args))
    return Text(FORMS[str(n.attrs[0])].format(*operands), PRODUCT)
