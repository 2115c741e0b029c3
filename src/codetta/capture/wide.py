"""The captured graph in float64, with fake values again, so that segments can be cut from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from codetta.capture.oracle import widen


def widened(gm: GraphModule) -> GraphModule:
    """``widen(gm)`` with ``meta["val"]`` on every node."""
    wide = widen(gm)
    old = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for before, after in zip(old, [n for n in wide.graph.nodes if n.op == "placeholder"], strict=True):
        after.meta = dict(before.meta)
    values = [n.meta["val"] for n in old]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    if mode is not None:
        with mode, torch.enable_grad(), double_precision():
            _Note(wide).run(*values)
    return wide


class _Note(fx.Interpreter):
    """Writes down what every node gives."""

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, kept in its ``meta``."""
        found = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = found
        return found


@contextmanager
def double_precision() -> Iterator[None]:
    """Operators that take PyTorch's default dtype take float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
