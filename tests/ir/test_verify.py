"""The verifier of graphs: it runs between passes in tests, and each thing that it looks for it finds."""

import pytest

from codetta import settings
from codetta.core.node import Node, Op
from codetta.core.rewrite import Rule
from codetta.core.types import bf16, tile
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.ir.build import add, const, input_, mul, neg
from codetta.ir.graph import Graph
from codetta.ir.verify import verify_graph
from codetta.rules import pipeline

X, Y = input_("x", tile(4)), input_("y", tile(4))
WRONG = Node(ops.NEG, (X,), (), tile(4, bf16), None)
STRANGE = Node(Op("neg", ops.NEG.infer, "map"), (X,), (), tile(4), None)


def test_a_graph_that_holds():
    verify_graph(Graph((X, Y), (("z", mul(add(X, Y), 2.0)), ("x", X), ("again", X))))
    verify_graph(Graph((), (("one", const(1.0)),)))


@pytest.mark.parametrize(
    "graph, problem",
    [
        (Graph((X,), (("z", WRONG),)), r"Tile\[M, 4, bf16\]> should have the type Tile\[M, 4, f32\]"),
        (Graph((X,), (("z", neg(WRONG)),)), "should have the type"),
        (Graph((X,), (("z", STRANGE),)), "of no op of the table"),
        (Graph((X,), (("z", add(X, Y)),)), r"the graph reads \['y'\], which are not among its inputs"),
        (Graph((X, X), (("z", X),)), r"inputs share names: \['x'\]"),
        (Graph((X, input_("x", tile(8))), (("z", X),)), r"inputs share names: \['x'\]"),
        (Graph((X,), (("z", X), ("z", neg(X)))), r"outputs share names: \['z'\]"),
        (Graph((X, neg(X)), (("z", X),)), r"inputs that are none: \[<neg"),
    ],
)
def test_what_does_not_hold(graph: Graph, problem: str):
    with pytest.raises(PlanError, match=problem):
        verify_graph(graph)


def test_it_runs_around_the_rules_while_tests_run(monkeypatch: pytest.MonkeyPatch):
    assert settings.verify_ir()
    graph = Graph((X,), (("z", neg(X)),))
    loose = Rule("-x = y", lambda n: Y if n is neg(X) else None, lambda: neg(X), "loose")
    monkeypatch.setattr(pipeline, "FORWARD", [loose])
    with pytest.raises(PlanError, match=r"the graph reads \['y'\]"):
        pipeline.reparameterise(graph)
    monkeypatch.setenv("CODETTA_VERIFY_IR", "0")
    assert pipeline.reparameterise(graph).roots == [Y]
