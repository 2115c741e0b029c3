"""Names of a segment's inputs and outputs: the same for every layer of the same structure, and readable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from codetta.capture.normalise import is_parameter, placeholder_name, readable_source
from codetta.capture.scope import Border
from codetta.core.node import Node, postorder, users
from codetta.core.types import Kind
from codetta.ir import ops

aten = torch.ops.aten

_BY_KIND = {
    Kind.TILE: "x",
    Kind.ROWVEC: "columns",
    Kind.COLVEC: "rows",
    Kind.GROUPVEC: "groups",
    Kind.TABLE: "table",
    Kind.SCALAR: "scalar",
}
_LANES = {"real": "cos", "imag": "sin"}
_TABLES = {aten.cos.default: "cos", aten.sin.default: "sin"}


def input_names(roots: Sequence[Node], borders: dict[Node, Border]) -> dict[Node, str]:
    """A name for each INPUT under the roots, in the order of first use."""
    readers = users(roots)
    leaves = [n for n in postorder(roots) if n.op is ops.INPUT]
    return dict(zip(leaves, unique(_input_name(borders[n], n, readers) for n in leaves), strict=True))


def output_names(roots: Sequence[Node], names: dict[Node, str]) -> list[str]:
    """A name for each output: of the GEMM that made it, of the input that it is, or the loss."""
    return unique(_output_name(r, names) for r in roots)


def unique(names: Iterable[str]) -> list[str]:
    """The names, a number behind every repetition."""
    found: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in found:
            count += 1
            candidate = f"{name}_{count}"
        found.append(candidate)
    return found


def module_of(node: fx.Node) -> str:
    """The module that a parameter belongs to or that an operator was called in: ``model.layers.3.mlp``, or ``""``."""
    if node.op == "placeholder":
        return placeholder_name(node).rpartition(".")[0] if is_parameter(node) else ""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    path = str(next(reversed(stack.values()))[0])
    return readable_source(path) if path.startswith("L[") else path


def layer_of(node: fx.Node) -> str:
    """The layer that a node belongs to: its module's name up to the first number."""
    found = re.match(r"(.*?\b\d+)(\.|$)", module_of(node))
    return found.group(1) if found else ""


def _input_name(border: Border, n: Node, readers: dict[Node, list[Node]]) -> str:
    source = _before_detach(border.source)
    if source.op == "placeholder" and is_parameter(source):
        return _short(placeholder_name(source))
    if border.type.kind is Kind.TABLE:
        return _LANES.get(border.lane) or _table_name(source)
    if border.type.kind is Kind.COLVEC and not border.type.dtype.is_float:
        return "target"
    if border.type.kind is Kind.TILE and border.dims is None:
        return "weight"
    if border.type.kind is Kind.TILE and all(_adds_to_gemm(n, u) for u in readers[n]):
        return "residual"
    return _BY_KIND[border.type.kind]


def _before_detach(source: fx.Node) -> fx.Node:
    inner = source.args[0] if source.target is aten.detach.default else None
    return inner if isinstance(inner, fx.Node) else source


def _short(name: str) -> str:
    """The last two words of a parameter's name: ``model.layers.0.self_attn.q_proj.weight`` is ``q_proj_weight``."""
    words = [w for w in re.split(r"\W+", name) if w and not w.isdigit()]
    short = "_".join(words[-2:])
    return short if short.isidentifier() else f"p_{short}"


def _table_name(source: fx.Node) -> str:
    """Whether a table is of cosines or of sines, seen from the operators that made it."""
    for _ in range(8):
        if source.target in _TABLES:
            return _TABLES[source.target]
        inner = source.args[0] if source.args else None
        if not isinstance(inner, fx.Node):
            break
        source = inner
    return "table"


def _adds_to_gemm(n: Node, user: Node) -> bool:
    others = [a for a in user.args if a is not n]
    return user.op is ops.ADD and any(m.op is ops.MATMUL for m in postorder(others))


def _output_name(root: Node, names: dict[Node, str]) -> str:
    if root in names:
        return names[root]
    order = postorder([root])
    if root.type.kind is Kind.SCALAR and any(n.op is ops.LSE for n in order):
        return "loss"
    last = next((n for n in reversed(order) if n.op is ops.MATMUL), None)
    if last is None:
        return "y"
    weight = next((names[n] for n in postorder([last.args[1]]) if n in names), "y")
    return weight.removesuffix("_weight")
