"""A tensor graph: named inputs and named outputs, everything else is nodes in between."""

from __future__ import annotations

from dataclasses import dataclass

from codetta.core.node import Node, postorder
from codetta.ir import ops


@dataclass(frozen=True, slots=True)
class Graph:
    """What one segment computes. Inputs are INPUT nodes; an output may be an input."""

    inputs: tuple[Node, ...]
    outputs: tuple[tuple[str, Node], ...]

    @property
    def roots(self) -> list[Node]:
        """The output nodes in order."""
        return [n for _, n in self.outputs]

    @property
    def nodes(self) -> list[Node]:
        """Every node of the outputs, arguments first."""
        return postorder(self.roots)

    @property
    def contractions(self) -> list[Node]:
        """The GEMMs, in order."""
        return [n for n in self.nodes if n.op is ops.MATMUL]
