"""The first layer and tensor past the bar: a fault put into one layer is found there, whichever way it acts."""

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from codetta.audit import runs
from codetta.audit.families import subject
from codetta.audit.layers import calls_in_order, check_layers, watched
from codetta.audit.models import Subject
from codetta.capture.backend import backend
from codetta.errors import UnsupportedError
from ways import BARS, fresh

BAR = BARS[torch.float32]


class Layer(nn.Module):
    """A norm, a gated pair of linears, and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-5)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Three layers between two linears; no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def given() -> Subject:
    """The model and a batch."""
    torch._dynamo.reset()
    model = Model()
    fresh(model, 0)
    return Subject("three layers", model, {"x": torch.randn(48, 8, generator=torch.Generator().manual_seed(0))})


def wrong_forward(x: Tensor) -> Tensor:
    """Off by one part in a thousand."""
    return x * 1.001


def wrong_backward(x: Tensor) -> Tensor:
    """Right, with a gradient that is off by one part in a thousand."""
    return x + 0.001 * (x - x.detach())


def put(monkeypatch, fault, module):
    """A backend for which the result of a linear module is another."""

    def faulty(gm, example_inputs, *, options=None):
        for node in list(gm.graph.nodes):
            paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            if "linear" in str(node.target) and paths[-1].endswith(module):
                with gm.graph.inserting_after(node):
                    changed = gm.graph.call_function(fault, (node,))
                changed.meta = dict(node.meta)
                node.replace_all_uses_with(changed, delete_user_cb=lambda user, changed=changed: user is not changed)
        gm.recompile()
        return backend(gm, example_inputs, options=options)

    monkeypatch.setattr(runs, "backend", faulty)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("per_block", [False, True])
def test_fault_in_forward(monkeypatch, per_block):
    """The layer's own result is the first that is off, and inside of it the module's; what is before it is right."""
    # blocks are one piece of code: compiled alone, all have the fault, and the first of them is found
    put(monkeypatch, wrong_forward, "up" if per_block else "layers.1.up")
    found = check_layers(given(), seeds=2, per_block=per_block, bar=BAR)
    layer = "layers.0" if per_block else "layers.1"
    assert found.first.layer == found.first.tensor.name == layer
    assert found.first.tensor.kind == "activation"
    assert found.first_inside.tensor.name == f"{layer}.up"
    assert f"inside of it: {layer}, activation {layer}.up: relative error 0.001" in str(found)
    told = json.loads(json.dumps(found.to_json()))
    assert not told["ok"]
    assert told["first"]["layer"] == layer
    assert told["first_inside"]["name"] == f"{layer}.up"


def test_fault_in_backward(monkeypatch):
    """All that forward gives is right, and so are the gradients of later layers. The first that is off is that of the
    weight behind the fault, where the walk meets it; all earlier layers' are off too."""
    put(monkeypatch, wrong_backward, "layers.1.down")
    found = check_layers(given(), seeds=2, bar=BAR)
    assert found.first.layer == "layers.1"
    assert found.first.tensor.name == "layers.1.down.weight"
    assert found.first.tensor.kind == "gradient"
    assert found.inside == ()
    assert "first past the bar: layers.1, gradient layers.1.down.weight: relative error" in str(found)
    off = [p.tensor.name for p in found.tensors if p.tensor.problem]
    assert "layers.1.up.weight" in off
    assert not [name for name in off if "layers.2" in name or "last" in name]


def test_order_of_execution():
    """Activations forward; gradients backward, and a parameter's comes where its module was called."""
    found = check_layers(given(), seeds=1, bar=BAR)
    assert found.ok, str(found)
    assert "no tensor misses the bar" in str(found)
    assert [p.tensor.kind for p in found.tensors] == ["activation"] * 3 + ["output"] + ["gradient"] * 19
    assert [p.tensor.name for p in found.tensors[:4]] == ["layers.0", "layers.1", "layers.2", "output"]
    owners = [p.tensor.name.rpartition(".")[0] for p in found.tensors[4:]]
    layers = [f"layers.{i}.{n}" for i in (2, 1, 0) for n in ("down", "up", "gate", "norm")]
    assert list(dict.fromkeys(owners)) == ["last", *layers, "first"]


def test_tied_weights_and_a_loss():
    """GPT-2, whose embedding is its head: the gradient is complete last. Nothing is left behind at the model."""
    torch._dynamo.reset()
    gpt2 = subject("gpt2", torch.float32, tiny=True)
    found = check_layers(gpt2, seeds=1, bar=BAR)
    assert found.ok, str(found)
    assert {p.tensor.name for p in found.tensors} >= {"transformer.h.0", "transformer.h.1", "loss", "logits"}
    assert found.tensors[-1].layer == "transformer.wte"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt2.model.modules())


def test_modules_called_twice_have_two_names():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(self.a(x))

    model, x = Twice(), torch.randn(2, 4)
    with watched(model, {"a": model.a}) as around:
        seen = around(x)["activation"]
    assert list(seen) == ["a", "a #2"]
    torch.testing.assert_close(seen["a #2"], model(x))
    assert calls_in_order(model, {"x": x}) == ["", "a"]


def test_a_model_without_layers():
    with pytest.raises(UnsupportedError, match="no blocks"):
        check_layers(Subject("a linear", nn.Linear(4, 4), {"input": torch.randn(2, 4)}), seeds=1)
