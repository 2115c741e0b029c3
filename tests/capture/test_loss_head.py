"""An LM head whose logits nobody reads becomes one call: with what models put in between, and only then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from codetta.capture.backend import recording
from codetta.capture.loss_head import head_loss
from codetta.testing import relative_error
from ways import compiled, llama

Logits = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """A hidden layer, a head, and something between it and the loss; returns the loss and the logits."""

    def __init__(self, between: Logits, bias: bool = False, **options: object) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(16, 24), nn.Linear(24, 65, bias=bias)
        self.between, self.options = between, options

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.between(self.head(functional.silu(self.hidden(x))))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), **self.options), logits


BETWEEN: dict[str, tuple[Logits, dict[str, object]]] = {
    "nothing": (lambda z: z, {}),
    "a sum, another ignored index": (lambda z: z, {"reduction": "sum", "ignore_index": 3}),
    "single losses": (lambda z: z.view(-1, 9, 65), {"reduction": "none"}),
    "smoothing": (lambda z: z, {"label_smoothing": 0.1}),
    "a factor": (lambda z: z * 0.25, {}),
    "a divisor": (lambda z: z / 8.0, {}),
    "a cap": (lambda z: torch.tanh(z / 5.0) * 5.0, {}),
    "a factor and a cap": (lambda z: torch.tanh(z * 2.0 / 5.0) * 5.0, {}),
}
LEFT: dict[str, Logits] = {
    "another function": torch.sin,
    "a tanh that is no cap": lambda z: torch.tanh(z / 5.0) * 3.0,
    "a shift": lambda z: z + 1.0,
}


def batch(ignored: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 65, (2, 9), generator=generator)
    targets[0, :3] = ignored
    return torch.randn(2, 9, 16, generator=generator), targets


def heads(found: list) -> int:
    return sum(n.target is head_loss for g in found for n in g.gm.graph.nodes)


def expect(model: nn.Module, calls: int) -> None:
    """Loss and gradients are the model's own."""
    x, targets = batch(getattr(model, "options", {}).get("ignore_index", -100))
    want, _ = model(x, targets)
    trained = [p for p in model.parameters() if p.requires_grad]
    exact = torch.autograd.grad(want.sum(), trained)
    with recording() as found:
        loss, _ = compiled(model, logits="never")(x, targets)
    torch.testing.assert_close(loss, want)
    for got, g in zip(torch.autograd.grad(loss.sum(), trained), exact, strict=True):
        assert relative_error(got, g.double()) < 1e-5
    assert heads(found) == calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_models_put_before_the_loss(name, bias):
    between, options = BETWEEN[name]
    torch.manual_seed(0)
    expect(Model(between, bias, **options), 1)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_understood_stays(name):
    torch.manual_seed(0)
    expect(Model(LEFT[name]), 0)


def test_logits_that_somebody_reads_are_computed():
    """In the graph itself: no option says that they are not."""

    class Reading(Model):
        def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.hidden(x))
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return loss + logits.square().mean(), logits

    torch.manual_seed(0)
    expect(Reading(lambda z: z), 0)


def test_a_model_of_transformers():
    """With its shifted labels, its upcast, and a count of items."""
    model = llama(1)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    with recording() as found:
        loss = compiled(model, logits="never")(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(7)).loss
    want = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(7)).loss
    assert heads(found) == 1
    torch.testing.assert_close(loss, want)
    for a, b in zip(*(torch.autograd.grad(v, list(model.parameters())) for v in (loss, want)), strict=True):
        assert relative_error(a, b.double()) < 1e-5


@pytest.mark.parametrize("merged, calls", [(True, 1), (False, 0)])
def test_an_adapter_on_the_head(merged, calls):
    """LoRA on a frozen head gets its gradient: as a weight that is added to the head's, and as a path beside it, which
    is no single linear layer and stays."""

    class Adapted(Model):
        def __init__(self) -> None:
            super().__init__(lambda z: z)
            self.head.weight.requires_grad_(False)
            self.down, self.up = (nn.Parameter(torch.randn(s)) for s in ((4, 24), (65, 4)))

        def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            h = self.hidden(x)
            beside = functional.linear(functional.linear(h, self.down), self.up)
            weight = self.head.weight + self.up @ self.down
            logits = functional.linear(h, weight) if merged else self.head(h) + beside
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    torch.manual_seed(0)
    expect(Adapted(), calls)
