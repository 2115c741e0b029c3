"""The repeated blocks of a model: what each of them is called with, and each compiled alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from codetta.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Call:
    """A block and the arguments that its model calls it with."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of modules: the layers, whatever a model calls them. UnsupportedError where
    there are none."""
    found = list(_members(model))
    if not found:
        hint = "layers are looked for in an nn.ModuleList or nn.ModuleDict"
        raise UnsupportedError("the model has no blocks to compile one by one", hint=hint)
    return found


def calls_of(model: nn.Module, batch: Mapping[str, Any]) -> list[Call]:
    """The call of each block in one forward of the model, which on the meta device computes nothing."""
    found: list[Call] = []

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(Call(block, *pytree.tree_map_only(Tensor, _as_leaf, (args, kwargs))))

    handles = [b.register_forward_pre_hook(note, with_kwargs=True) for b in blocks_of(model)]
    try:
        with _Unknown():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def compiled_alone(model: nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """The model with each of its blocks compiled alone, as regional compilation does it; only calls through the result
    see that."""
    calls = {block: torch.compile(block._call_impl, backend=backend) for block in blocks_of(model)}

    def run(*args: Any, **kwargs: Any) -> Any:
        before = {block: block._compiled_call_impl for block in calls}
        try:
            for block, call in calls.items():
                block._compiled_call_impl = call
            return model(*args, **kwargs)
        finally:
            for block, old in before.items():
                block._compiled_call_impl = old

    return run


class _Unknown(TorchDispatchMode):
    """A number read off a tensor without memory is one: models ask whether positions are in order, tokens all there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer such a question; run all else."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def _members(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        yield from (m for m in model.children() if any(True for _ in m.children()))
    else:
        for child in model.children():
            yield from _members(child)


def _as_leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
