"""Two graphs mean the same: equal types, values and gradients in plain float64 PyTorch, see mirror."""

from __future__ import annotations

import torch

import mirror
from codetta.core.node import Node, postorder
from codetta.ir import ops
from codetta.ir.graph import Graph

ROWS = 5


def graph_of(*roots: Node) -> Graph:
    """The graph with these outputs, its inputs in the order in which they are met."""
    leaves = tuple(n for n in postorder(roots) if n.op is ops.INPUT)
    return Graph(leaves, tuple((f"y{i}", r) for i, r in enumerate(roots)))


def expect_same(before: Graph, after: Graph, tolerance: float = 1e-12, seed: int = 0) -> None:
    """Equal outputs, types and gradients."""
    assert [(key, n.type) for key, n in after.outputs] == [(key, n.type) for key, n in before.outputs]
    feed = mirror.random_feed(before, ROWS, seed)
    want, got = mirror.outputs(before, feed, ROWS), mirror.outputs(after, feed, ROWS)
    cotangents = mirror.random_cotangents(want)
    wrt = [n for n, t in feed.items() if t.requires_grad]
    expected, found = (mirror.gradients(out, feed, cotangents, wrt) for out in (want, got))
    for key, w in want.items():
        torch.testing.assert_close(got[key], w, rtol=tolerance, atol=tolerance * (1 + w.abs().max().item()))
    for key, e in expected.items():
        g = found[key]
        if e is None or g is None:
            assert (e if g is None else g) is None or not (e if g is None else g).any(), key
        else:
            torch.testing.assert_close(g, e, rtol=tolerance, atol=tolerance * (1 + e.abs().max().item()))
