"""Where a graph's segments run, and its stacked parameters laid side by side for those who run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from codetta.backends.hopper import support
from codetta.capture.normalise import is_parameter, placeholder_name
from codetta.capture.options import BackendOptions
from codetta.errors import SettingsError
from codetta.runtime import pack, registry


@dataclass(frozen=True, slots=True)
class Target:
    """The backend that runs segments, and the reason why it cannot where it was only hoped for."""

    backend: str
    why_not: str | None = None


def target(chosen: BackendOptions, device: str, example_inputs: Sequence[Any]) -> Target:
    """Who runs the segments of a graph on this kind of device; SettingsError if kernels were insisted on in vain."""
    if chosen.kernels == "reference" or chosen.widen or (device != "cuda" and chosen.kernels == "auto"):
        return Target("reference")
    reason = _why_not(device, example_inputs)
    if reason is not None and chosen.kernels == "hopper":
        raise SettingsError(f"option kernels='hopper', but {reason}", hint="kernels='auto' takes what there is")
    return Target("hopper" if device == "cuda" else "reference", reason)


def _why_not(device: str, example_inputs: Sequence[Any]) -> str | None:
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    if device != "cuda":  # a graph of sizes and masks between two others may well be on the CPU
        floats = any(x.is_floating_point() for x in tensors)
        return support.why_not() or (f"the model is on the {device} and not on the GPU" if floats else None)
    gpus = sorted({x.device.index for x in tensors if x.is_cuda})
    reasons = [support.why_not(i) for i in gpus] or [support.why_not()]
    return next((r for r in reasons if r is not None), None)


def pack_stacks(spliced: GraphModule, example_inputs: Sequence[Any], move: bool) -> None:
    """Note which parameters each segment stacks, and lay them side by side if asked to ``move`` them: what Dynamo hands
    over are the very Parameters of the model."""
    given = dict(zip(spliced.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    groups: dict[tuple[str, ...], list[Any]] = {}
    for call in spliced.graph.find_nodes(op="call_function", target=torch.ops.codetta.segment.default):
        inputs, key, _ = call.args
        for positions in registry.segment_of(key).stacks:
            nodes = [inputs[i] for i in positions]
            if all(n in given and is_parameter(n) for n in nodes):  # behind a view, another layout would be needed
                groups[tuple(placeholder_name(n) for n in nodes)] = [given[n] for n in nodes]
    for names in groups:
        pack.remember(names)
    if move:
        pack.pack_graph(list(groups.items()))
