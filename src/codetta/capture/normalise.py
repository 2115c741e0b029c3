"""Turns the graph that Dynamo hands to a backend into one of plain ATen operators, with every mode made explicit."""

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

from codetta.capture.aten_trace import trace_aten
from codetta.capture.explicit import Rebuild, rebuild
from codetta.capture.inplace import functionalise, mark_pinned, mutated_arguments
from codetta.errors import CaptureError, CodettaError

NAME = "codetta_name"
PARAMETER = "codetta_parameter"

_WRAPPERS = {"_modules", "_parameters", "_buffers", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def normalise(gm: GraphModule, example_inputs: Sequence[object]) -> GraphModule:
    """The graph of ``gm`` in whole (pre-dispatch) ATen operators, with the same inputs and outputs.

    Call it inside the backend. Run the result with autocast disabled: autocast has become ``aten.to.dtype`` nodes,
    no_grad ``aten.detach``, checkpointed bodies are inlined (``meta["recompute"]``, ``meta["ac_graph_id"]``).
    ``meta["val"]`` is each node's fake value. A node with ``meta["codetta_pinned"]`` touches memory that the graph
    mutates: neither move it nor take it into a segment. What cannot be expressed raises ``CaptureError``.
    """
    fake_mode = _fake_mode(example_inputs)
    inputs = [_fake_input(fake_mode, x) for x in example_inputs]
    kinds = _device_types(inputs)
    try:
        with fake_mode:
            traced = trace_aten(gm, inputs, kinds)
            functionalise(traced)
        old = [n for n in gm.graph.nodes if n.op == "placeholder"]
        state = Rebuild(
            root=traced,
            fake_mode=fake_mode,
            escaping=_escaping(traced),
            pure=not any(mutated_arguments(n) for n in traced.graph.nodes),
            grad=torch.is_grad_enabled(),
        )
        result = rebuild(state, traced, inputs, [n.name for n in old])
    except CodettaError:
        raise
    except Exception as error:
        raise CaptureError(f"the graph could not be traced into ATen operators: {error}") from error
    _name_placeholders(old, result)
    mark_pinned(result)
    result.graph.eliminate_dead_code()
    result.recompile()
    return result


def placeholder_name(node: Node) -> str:
    """The name a person knows a lifted input by, such as ``model.layers.0.mlp.up_proj.weight`` or ``input_ids``."""
    if NAME in node.meta:
        return str(node.meta[NAME])
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    return readable_source(source.name() if callable(source.name) else str(source.name))


def is_parameter(node: Node) -> bool:
    """Whether a placeholder is a parameter or a buffer of a module, and so the same tensor on every call."""
    if PARAMETER in node.meta:
        return bool(node.meta[PARAMETER])
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def readable_source(source: str) -> str:
    """Dynamo's expression for an input, as a dotted name: ``L['self']._modules['a'].weight`` is ``a.weight``."""
    match = re.fullmatch(r"[LG]((?:\['[^']*'\]|\[\d+\]|\.\w+)+)(.*)", source)
    if match is None:
        return source
    parts = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", match.group(1))
    words = [word for groups in parts for word in groups if word and word not in _WRAPPERS]
    if len(words) > 1 and words[0] in ("self", "kwargs"):
        words = words[1:]
    return ".".join(words) + match.group(2)


def ignore_warning_loggers() -> None:
    """Let Dynamo trace through transformers' ``logger.warning_once`` instead of breaking the graph there.

    GPT-2 warns about its loss type while it is traced. transformers adds these methods to ``logging.Logger`` itself;
    where it was not imported there is nothing to do, and nothing is imported here. The names go into
    ``torch._dynamo.config.ignore_logging_functions``, so Dynamo drops the call: the warning is not shown. Not before
    PyTorch 2.13: 2.11 writes its configuration out as JSON at every compilation, and fails on a function in it.
    """
    if torch.__version__ < "2.13":
        return
    methods = [getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")]
    torch._dynamo.config.ignore_logging_functions.update(m for m in methods if m is not None)


def _fake_mode(example_inputs: Sequence[object]) -> FakeTensorMode:
    """The fake mode of Dynamo's trace, whose shape environment turns what we learn into guards."""
    fakes = [x for x in example_inputs if isinstance(x, FakeTensor)]
    if fakes:
        return fakes[0].fake_mode
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)


def _fake_input(fake_mode: FakeTensorMode, value: Any) -> Any:
    """``value`` as a fake tensor with the symbolic sizes that Dynamo chose for it."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    context = TracingContext.try_get()
    symbolic = context.tensor_to_context.get(value) if context is not None else None
    source = symbolic.tensor_source if symbolic is not None else ConstantSource("input")
    return fake_mode.from_tensor(
        value, static_shapes=symbolic is None, symbolic_context=symbolic, source=source if symbolic else None
    )


def _device_types(inputs: Sequence[Any]) -> tuple[str, ...]:
    """The kinds of device in play that autocast knows."""
    kinds = {x.device.type for x in inputs if isinstance(x, Tensor)} | {"cpu"}
    return tuple(sorted(k for k in kinds if torch.amp.is_autocast_available(k)))


def _escaping(traced: GraphModule) -> frozenset[int]:
    """The memory that callers can see: of inputs and of outputs."""
    seen = [n for n in traced.graph.nodes if n.op == "placeholder"]
    seen += traced.graph.output_node().all_input_nodes
    values = [n.meta.get("val") for n in seen]
    return frozenset(v.untyped_storage()._cdata for v in values if isinstance(v, Tensor))


def _name_placeholders(old: Sequence[Node], result: GraphModule) -> None:
    new = [n for n in result.graph.nodes if n.op == "placeholder"]
    for before, after in zip(old, new, strict=True):
        after.meta[NAME] = placeholder_name(before)
        after.meta[PARAMETER] = is_parameter(before)
