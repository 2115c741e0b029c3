"""The table of ATen operators that codetta understands, and the reasons why others stay with PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from codetta.capture.block_attention import block_attention, block_lists
from codetta.capture.contractions import CONTRACTIONS
from codetta.capture.maps import MAPS
from codetta.capture.programs import PROGRAM, PROGRAMS
from codetta.capture.scope import Meaning, Scope
from codetta.capture.views import VIEWS
from codetta.errors import UnsupportedError
from codetta.nn.attention import flash_attention

aten = torch.ops.aten

TABLE: dict[Any, Callable[..., Meaning]] = {**MAPS, **VIEWS, **CONTRACTIONS, **PROGRAMS}

GEMMS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, PROGRAM)

REASONS: dict[Any, str] = {
    aten.scaled_dot_product_attention.default: "attention stays with PyTorch",
    block_attention: "attention stays with PyTorch",
    flash_attention: "attention is FlashAttention's",
    block_lists: "which blocks attention looks at is found by PyTorch",
    aten.embedding.default: "an embedding is a gather of rows",
    aten.detach.default: "the gradient stops here",
    aten.softmax.int: "a softmax over a row is no row-local map of one GEMM's tile",
    aten.conv2d.default: "convolutions stay with PyTorch",
}


def reason_for(target: Any) -> str:
    """Why an operator that the table does not have stays with PyTorch."""
    return REASONS.get(target, "no rule for this operator")


def translate(scope: Scope) -> Meaning:
    """What the operator of ``scope.node`` means as nodes; raises where a rule refuses it."""
    node = scope.node
    rule = TABLE.get(node.target)
    if rule is None or not isinstance(node.target, OpOverload):
        raise UnsupportedError(reason_for(node.target))
    values = arguments(node, node.target)
    count, takes_rest = _ARITY[rule]
    for name, value, default in () if takes_rest else values[count:]:
        if value != default:
            raise UnsupportedError(f"{node.target} with {name}={value}")
    return rule(scope, *(value for _, value, _ in (values if takes_rest else values[:count])))


def arguments(node: fx.Node, target: OpOverload) -> list[tuple[str, Any, Any]]:
    """Each argument of the operator's schema: its name, what was given, and its default."""
    found: list[tuple[str, Any, Any]] = []
    for i, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
        found.append((argument.name, given, default))
    return found


def _arity(rule: Callable[..., Meaning]) -> tuple[int, bool]:
    """How many arguments of the operator a rule takes, and whether it looks past the rest because the result tells."""
    kinds = [p.kind for p in inspect.signature(rule).parameters.values()]
    return kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1, inspect.Parameter.VAR_POSITIONAL in kinds


_ARITY = {rule: _arity(rule) for rule in TABLE.values()}


def is_gemm(node: fx.Node) -> bool:
    """Whether an operator multiplies an activation by a matrix."""
    if node.op != "call_function" or node.target not in GEMMS:
        return False
    matrix = node.args[2] if node.target is aten.addmm.default else node.args[1]
    value = matrix.meta.get("val") if isinstance(matrix, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 2


def activation_of(node: fx.Node) -> fx.Node:
    """The left operand of a GEMM."""
    found = node.args[1] if node.target is aten.addmm.default else node.args[0]
    if not isinstance(found, fx.Node):
        raise UnsupportedError(f"{node.name} has no activation")
    return found
