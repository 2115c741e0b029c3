"""A model's blocks: which they are, what they are called with, each compiled alone."""

import pytest
import torch
from torch import nn

from codetta.audit.blocks import blocks_of, calls_of, compiled_alone
from codetta.audit.families import subject
from codetta.errors import UnsupportedError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x + scale * self.experts[0](x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleDict({"a": Layer(), "b": Layer()})
        self.other = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body.layers.values():
            x = layer(x, scale=0.5)
        return self.other[0](x)


def test_blocks_are_the_members_of_the_outermost_lists():
    """Not the experts inside of one, nor a list of single operators."""
    model = Model()
    assert blocks_of(model) == list(model.body.layers.values())
    with pytest.raises(UnsupportedError, match="no blocks"):
        blocks_of(nn.Sequential(nn.Linear(4, 4)))


def test_calls_have_the_arguments_of_the_model():
    model, x = Model(), torch.randn(3, 4)
    first, second = calls_of(model, {"x": x})
    assert first.block is model.body.layers["a"]
    assert first.kwargs == second.kwargs == {"scale": 0.5}
    torch.testing.assert_close(second.args[0], model.body.layers["a"](x, scale=0.5))
    assert second.args[0].is_leaf
    assert second.args[0].requires_grad
    assert not first.args[0].requires_grad


def test_calls_of_a_model_without_memory():
    """Transformers asks whether the positions are in order, which nobody knows there: they are."""
    given = subject("llama", torch.bfloat16, tiny=False)
    first, second = calls_of(given.model, given.batch)
    assert first.args[0].shape == second.args[0].shape == (2, 8192, 4096)
    assert first.kwargs["attention_mask"] is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_are_compiled_in_calls_through_the_result_alone():
    torch._dynamo.reset()
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    model, x = Model(), torch.randn(3, 4)
    ours = compiled_alone(model, backend)
    torch.testing.assert_close(ours(x), model(x))
    assert len(graphs) in (1, 2)
    assert all(b._compiled_call_impl is None for b in blocks_of(model))
