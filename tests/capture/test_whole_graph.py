"""What a whole training step's graph must not contain: copies in front of attention, masks, waits for the device; and
which of its inputs CUDA graphs need not copy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from capture.conftest import VOCABULARY, build
from codetta.capture import backend as entry
from codetta.capture.backend import backend
from codetta.errors import SettingsError

SDPA = torch.ops.aten.scaled_dot_product_attention.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FORWARD, BACKWARD = torch.ops.codetta.segment_forward.default, torch.ops.codetta.segment_backward.default
VIEWS = {"view", "permute", "transpose", "detach", "getitem", "slice", "unsqueeze", "squeeze", "alias"}
# They hand numbers to the host, which then waits for the device.
WAITS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount"}


class Step:
    """The graphs of one training step: as spliced, and what AOTAutograd made of it."""

    def __init__(self, model: nn.Module) -> None:
        self.static: list[int] = []
        ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entry, "lookup_backend", lambda name: self._inner)
            options = {"inner": "inductor", "cudagraphs": True}
            loss = torch.compile(model, backend=partial(backend, options=options), fullgraph=True)(
                input_ids=ids, labels=ids
            ).loss
            loss.backward()

    def _inner(self, gm: fx.GraphModule, inputs: object, config_patches: dict[str, object]) -> object:
        assert config_patches == {"triton.cudagraphs": True}
        self.spliced = gm
        return aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)(gm, inputs)

    def _forward(self, gm: fx.GraphModule, _: object) -> object:
        self.forward = gm
        self.static = list(TracingContext.get().fw_metadata.static_input_indices)
        return make_boxed_func(gm)

    def _backward(self, gm: fx.GraphModule, _: object) -> object:
        self.backward = gm
        return make_boxed_func(gm)


@pytest.fixture(params=["llama", "qwen3"], scope="module")
def step(request: pytest.FixtureRequest) -> Step:
    return Step(build(request.param))


def calls(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is target]


def name_of(node: fx.Node) -> str:
    """An operator's name without namespace and overload."""
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]


def source(node: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while name_of(node) in VIEWS:
        node = node.args[0]
    return node


def users(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a value or a view of it."""
    for user in node.users:
        yield from users(user) if name_of(user) in VIEWS else [user]


def test_attention_is_causal_without_a_mask(step: Step):
    found = calls(step.spliced, SDPA)
    assert len(found) == 2
    for node in found:
        assert node.args[3] is None
        assert node.args[5] is True


def test_attention_reads_what_one_segment_wrote(step: Step):
    """Queries, keys and values are views of results of one op, and its gradients go to one op as they are."""
    for node in calls(step.forward, FLASH):
        origins = {source(x) for x in node.args[:3]}
        assert len(origins) == 1
        assert origins.pop().target is FORWARD
    for node in calls(step.backward, FLASH_BACKWARD):
        assert {u.target for u in users(node)} == {BACKWARD}
        assert len(set(users(node))) == 1


def test_attention_is_read_where_it_was_written(step: Step):
    for node in calls(step.forward, FLASH):
        first = next(u for u in node.users if u.args[1] == 0)
        assert FORWARD in {u.target for u in users(first)}
        assert "clone" not in {name_of(u) for u in users(first)}


def test_nothing_waits_for_the_device(step: Step):
    for gm in (step.forward, step.backward):
        assert not [n for n in gm.graph.nodes if name_of(n) in WAITS]
        devices = {n.kwargs.get("device") for n in gm.graph.nodes if name_of(n) == "_to_copy"}
        assert devices <= {None}


def test_parameters_are_not_copied_for_a_replay(step: Step):
    names = [n.name for n in step.spliced.graph.find_nodes(op="placeholder")]
    assert [names[i] for i in step.static] == [n for n in names if "parameters" in n or "buffers" in n]
    assert len(names) > len(step.static)


def test_cuda_graphs_need_inductor():
    module = fx.symbolic_trace(nn.Identity())
    with pytest.raises(SettingsError, match="eager records none"):
        backend(module, [torch.zeros(1)], options={"cudagraphs": True})
