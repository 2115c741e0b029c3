"""Mixed precision of whole models: autocast over float32 parameters, float32 gains and a float32 stream beside bfloat16
weights. Ours is as near to the captured graph in float64 as eager is. Single norms and heads are in tests/cases."""

import copy

import pytest
import torch
from torch import Tensor, nn

from codetta.audit.models import Subject
from codetta.audit.verify import check
from codetta.capture.backend import recording
from codetta.core.types import Kind
from codetta.testing import Bar, geometric_mean
from features.training import Recipe, compile_, tokens, train
from ways import forward_plans, llama

# float32 results of bfloat16 GEMMs: half a unit in float32's last place would be nothing beside their errors
BAR = Bar(units=0.02 * 2**16)


class Autocast(nn.Module):
    """A model whose forward pass runs under autocast to bfloat16; backward does not, as PyTorch advises."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(input_ids=input_ids, labels=labels)


def narrow(model: nn.Module, wide: tuple[str, ...]) -> nn.Module:
    """The model with bfloat16 parameters, but those whose names have one of the words."""
    for name, p in model.named_parameters():
        if not any(word in name for word in wide):
            p.data = p.data.bfloat16()
    return model


MODELS = {
    "float32 parameters": llama,
    "float32 gains": lambda: narrow(llama(), ("norm",)),
    "float32 gains and stream": lambda: narrow(llama(), ("norm", "embed")),
}


@pytest.mark.parametrize("name", MODELS)
def test_as_exact_as_autocast(name):
    """Loss, logits and all gradients clear the bar, and gradients have their parameters' dtypes."""
    torch._dynamo.reset()
    model = Autocast(MODELS[name]())
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    with recording() as found:
        compared = check(Subject(name, model, {"input_ids": tokens(), "labels": tokens()}), seeds=5, bar=BAR)
    assert not compared.problems, "\n".join(compared.problems)
    gradients = {t.name: t.pooled.dtype for t in compared.tensors if t.kind == "gradient"}
    assert {n: d for n, d in gradients.items() if n in dtypes} == {n: d for n, d in dtypes.items() if n in gradients}
    stored = {
        t.dtype.name
        for plan in forward_plans(found)
        for t in plan.buffers.values()
        if t.kind is Kind.TILE and t.cols == 64
    }
    assert ("f32" in stored) == (name != "float32 gains")  # the stream, as wide as the embedding makes it


def test_training_under_autocast():
    """Four steps with float32 parameters: the weights are as near to a float32 run's as eager autocast's are. At ten
    times the rate training is chaotic, and two roundings part."""
    model = llama()
    runs = [
        train(m, Recipe(steps=4, autocast=narrow, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05)))
        for m, narrow in (
            (copy.deepcopy(model), None),
            (copy.deepcopy(model), torch.bfloat16),
            (compile_(model), torch.bfloat16),
        )
    ]
    exact, eager, ours = (run.weights for run in runs)
    far = {n: ((ours[n] - w).norm() / (eager[n] - w).norm()).item() for n, w in exact.items()}
    assert geometric_mean(far.values()) < 1.1
    assert max(far.values()) < 1.5
