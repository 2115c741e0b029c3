"""The oracle for captured models: the ATen graph in float64 throughout, run by PyTorch alone.

It shares nothing with rules, partition or backends. ``model.double()`` would be no oracle: norms, rotation tables and
losses of transformers cast to float32 by name, and here every such cast becomes one to float64.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from codetta.errors import CaptureError

aten = torch.ops.aten

# What a narrow dtype becomes. Integers and booleans stay what they are.
_WIDE = {
    dtype: torch.complex128 if dtype.is_complex else torch.float64
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
}
# Methods that are casts; sub-graphs that Dynamo left whole still hold them.
_CAST_METHODS = {"float": torch.float64, "half": torch.float64, "bfloat16": torch.float64, "cfloat": torch.complex128}


def widen(gm: GraphModule) -> GraphModule:
    """A copy of ``gm`` in which every cast to a narrower float is one to float64 (complex128), inputs included.

    Run it with ``float64_run``: operators without a dtype of their own follow PyTorch's default dtype.
    """
    wide = GraphModule(gm, copy.deepcopy(gm.graph))
    for node in list(wide.graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            _widen_source(wide, node)
        elif node.op == "call_function":
            _widen_call(node)
        elif node.op == "call_method":
            _widen_method(node)
    for node in wide.graph.nodes:
        node.meta.pop("val", None)
    wide.graph.lint()
    wide.recompile()
    return wide


def float64_run(gm: GraphModule, inputs: Sequence[Any]) -> Any:
    """The outputs of ``gm`` in float64, without gradients. Random operators draw other numbers than in ``gm``."""
    with torch.no_grad(), _double_precision():
        return widen(gm)(*_copies(inputs))


def float64_gradients(
    gm: GraphModule, inputs: Sequence[Any], cotangents: Sequence[Tensor | None] | None = None
) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    """The outputs of ``gm`` in float64, and the gradient of each input that requires one (``None`` for the others).

    ``cotangents`` has one entry an output, ``None`` where nothing flows back. Without it the first output is the loss.
    An input that no gradient reaches gets zeros.
    """
    leaves = _copies(inputs)
    with torch.enable_grad(), _double_precision():
        outputs = widen(gm)(*leaves)
        outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        seeds = _seeds(outputs, cotangents)
        wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in seeds],
                wanted,
                [g for _, g in seeds],
                allow_unused=True,
                materialize_grads=True,
            )
            if seeds and wanted
            else [torch.zeros_like(x) for x in wanted]
        )
    gradients = [next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in leaves]
    return tuple(pytree.tree_map_only(Tensor, Tensor.detach, y) for y in outputs), gradients


def _widen_source(wide: GraphModule, node: Node) -> None:
    """Cast an input or a constant to its wide dtype, whatever it comes in."""
    if node.op == "get_attr":
        value = _attribute(wide, str(node.target))
        if isinstance(value, GraphModule):
            setattr(wide, f"wide_{node.name}", widen(value))
            node.target = f"wide_{node.name}"
            return
    else:
        value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, Tensor) or value.dtype not in _WIDE:
        return
    with wide.graph.inserting_after(node):
        cast = wide.graph.call_function(aten.to.dtype, (node, _WIDE[value.dtype]))
    cast.meta["val"] = value
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _widen_call(node: Node) -> None:
    """Widen every dtype among the arguments of a call, and give factories the wide dtype they would not default to."""
    if node.target is aten.view.dtype:
        raise CaptureError(f"{node.name} looks at the bits of a number ({node.target}): it has no meaning in float64")
    node.args, node.kwargs = pytree.tree_map(_wider, (node.args, dict(node.kwargs)))
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(value, Tensor):
        return
    arguments = [a.name for a in node.target._schema.arguments]
    is_factory = not any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)
    if is_factory and "dtype" in arguments and node.kwargs.get("dtype") is None and value.dtype in _WIDE:
        node.kwargs = {**node.kwargs, "dtype": _WIDE[value.dtype]}


def _widen_method(node: Node) -> None:
    node.args, node.kwargs = pytree.tree_map(_wider, (node.args, dict(node.kwargs)))
    if node.target in _CAST_METHODS:
        node.args = (node.args[0], _CAST_METHODS[str(node.target)])
        node.target = "to"


def _wider(argument: Any) -> Any:
    return _WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def _attribute(gm: GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Wide copies of the inputs; those that require a gradient are leaves that require one."""
    return [_copy(x) if isinstance(x, Tensor) else x for x in inputs]


def _copy(x: Tensor) -> Tensor:
    return x.detach().to(_WIDE.get(x.dtype, x.dtype), copy=True).requires_grad_(x.requires_grad)


def _seeds(outputs: Sequence[Any], cotangents: Sequence[Tensor | None] | None) -> list[tuple[Tensor, Tensor]]:
    """Pairs of an output and what flows back into it."""
    if cotangents is None:
        loss = outputs[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise CaptureError(f"the first output is no loss: {shape}", hint="give one cotangent an output")
        return [(loss, torch.ones_like(loss))] if loss.requires_grad else []
    if len(cotangents) != len(outputs):
        raise CaptureError(f"{len(outputs)} outputs, {len(cotangents)} cotangents")
    pairs = zip(outputs, cotangents, strict=True)
    return [(y, g.to(y.dtype)) for y, g in pairs if g is not None and isinstance(y, Tensor) and y.requires_grad]


@contextmanager
def _double_precision() -> Iterator[None]:
    """Float64 by default, no autocast: what has no dtype of its own is computed in float64 too."""
    default = torch.get_default_dtype()
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    torch.set_default_dtype(torch.float64)
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
