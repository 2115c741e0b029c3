"""Which inputs of a graph lie at the same address on every call: what Dynamo knew of its own graph, told of another.

CUDA graphs read such inputs where they lie; others they copy to a place of their own before every replay."""

from __future__ import annotations

from torch.fx import GraphModule


def keep_static_inputs(dynamo: GraphModule, graph: GraphModule) -> None:
    """Say of each input of ``graph`` what Dynamo said of the same input, in the form in which AOTAutograd asks for it.
    A graph with tensors of its own is left as it is: AOTAutograd wants their sources too, and they have none."""
    if any(True for _ in graph.parameters()) or any(True for _ in graph.buffers()):
        return
    before, after = (gm.graph.find_nodes(op="placeholder") for gm in (dynamo, graph))
    for old, new in zip(before, after, strict=True):
        new._dynamo_source = getattr(old, "_dynamo_source", None)
        if "tensor_dict" in old.meta:
            new.meta["tensor_dict"] = old.meta["tensor_dict"]
    graph._param_name_to_source = {}  # type: ignore[assignment]  # parameters are inputs
    graph.meta["dynamo_compile_id"] = dynamo.meta.get("dynamo_compile_id")  # or AOTAutograd asks for none of it
