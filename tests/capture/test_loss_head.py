"""An LM head whose logits nobody reads becomes one call: with what models put in between, and only then."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from codetta.audit.explain import explain
from codetta.capture.backend import recording
from codetta.capture.loss_head import head_loss
from codetta.errors import ShapeError
from codetta.nn import head_run
from codetta.testing import relative_error
from ways import compiled, llama, whole_model_agrees

Logits = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """A hidden layer, a head, and something between it and the loss; returns the loss and the logits."""

    def __init__(self, between: Logits, bias: bool = False, **options: object) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(16, 24), nn.Linear(24, 65, bias=bias)
        self.between, self.options = between, options

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.between(self.head(functional.silu(self.hidden(x))))
        targets = targets[-logits.shape[0] :, -logits.shape[1] :].flatten()
        if logits.shape[-1] < 65:
            targets = targets.clamp(max=logits.shape[-1] - 1)
        if (more := logits[..., 0].numel() - targets.numel()) > 0:
            targets = functional.pad(targets, (0, more), value=-100)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets, **self.options), logits


BETWEEN: dict[str, tuple[Logits, dict[str, object]]] = {
    "nothing": (lambda z: z, {}),
    "a sum, another ignored index": (lambda z: z, {"reduction": "sum", "ignore_index": 3}),
    "single losses": (lambda z: z.view(-1, 9, 65), {"reduction": "none"}),
    "smoothing": (lambda z: z, {"label_smoothing": 0.1}),
    "a factor": (lambda z: z * 0.25, {}),
    "a divisor": (lambda z: z / 8.0, {}),
    "a cap": (lambda z: torch.tanh(z / 5.0) * 5.0, {}),
    "a factor and a cap": (lambda z: torch.tanh(z * 2.0 / 5.0) * 5.0, {}),
    "all but the last token": (lambda z: z[:, :-1], {}),
    "some tokens, scaled": (lambda z: (z[:1][:, 2::3] / 4.0).contiguous(), {}),
}
LEFT: dict[str, Logits] = {
    "another function": torch.sin,
    "a tanh that is no cap": lambda z: torch.tanh(z / 5.0) * 3.0,
    "a shift": lambda z: z + 1.0,
    "columns that become rows": lambda z: z.view(2, 45, 13),
    "some tokens of a flat view": lambda z: z.flatten(0, 1)[2:7][None],
    "some columns": lambda z: z[..., :30],
}


def batch(ignored: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 65, (2, 9), generator=generator)
    targets[0, :3] = ignored
    return torch.randn(2, 9, 16, generator=generator), targets


def heads(found: list) -> int:
    return sum(n.target is head_loss for g in found for n in g.gm.graph.nodes)


def expect(model: nn.Module, calls: int, **options: object) -> None:
    """Loss and gradients are the model's own."""
    x, targets = batch(getattr(model, "options", {}).get("ignore_index", -100))
    want, _ = model(x, targets)
    trained = [p for p in model.parameters() if p.requires_grad]
    exact = torch.autograd.grad(want.sum(), trained)
    with recording() as found:
        loss, _ = compiled(model, logits="never", **options)(x, targets)
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


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize("logits", ["auto", "always", "never"])
def test_who_reads_the_logits(logits, memory):
    """A model that returns only its loss has one call where these are never wanted, or where that saves their memory,
    which these small ones take only if they are asked to; one that returns its logits, where these are never wanted."""

    class Loss(Model):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return super().forward(x, targets)[0]

    torch.manual_seed(0)
    inputs = batch()
    for model, calls in (
        (Loss(lambda z: z), logits == "never" or (logits, memory) == ("auto", "lean")),
        (Model(lambda z: z), logits == "never"),
    ):
        want = model(*inputs)
        with recording() as found:
            got = compiled(model, logits=logits, memory=memory)(*inputs)
        assert heads(found) == calls
        assert [len(g.heads) for g in found] == [calls]
        assert not [o for g in found for o in g.capture.opaque if "head_loss" in o.op]
        (loss, expected) = (got, want) if isinstance(want, Tensor) else (got[0], want[0])
        torch.testing.assert_close(loss, expected)
        if not isinstance(want, Tensor) and logits != "never":
            torch.testing.assert_close(got[1], want[1])


def test_rows_that_are_batch_invariant_keep_their_programs():
    """The library's GEMMs behind a head of ours depend on the number of rows."""
    torch.manual_seed(0)
    with recording() as found:
        compiled(Model(lambda z: z), logits="never", batch_invariant=True)(*batch())
    assert heads(found) == 0


LABELS: dict[str, Callable[[Tensor], dict[str, object]]] = {
    "labels": lambda ids: {"labels": ids},
    "labels of some tokens, a number of items": lambda ids: {
        "labels": ids.masked_fill(ids % 3 == 0, -100),
        "num_items_in_batch": 7,
    },
    "a tensor of items": lambda ids: {"labels": ids, "num_items_in_batch": torch.tensor(7)},
    "shifted labels": lambda ids: {"labels": ids, "shift_labels": ids.roll(-1, 1).contiguous()},
    "logits of the last tokens": lambda ids: {"labels": ids[:, -5:], "logits_to_keep": 5},
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_model_of_transformers(labels, memory):
    """C26, C30: with its shift of labels, its upcast, and a count of items; every label form and the sliced logits."""
    model = llama(1)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    given = LABELS[labels](ids)
    with recording() as found:
        loss = compiled(model, logits="never", memory=memory)(input_ids=ids, **given).loss
    want = model(input_ids=ids, **given).loss
    assert heads(found) == 1
    torch.testing.assert_close(loss, want)
    for a, b in zip(*(torch.autograd.grad(v, list(model.parameters())) for v in (loss, want)), strict=True):
        assert relative_error(a, b.double()) < 1e-5


@pytest.mark.parametrize("logits", ["auto", "never"])
def test_evaluation_and_no_labels(logits):
    """C30: without labels the logits are what is asked for; in evaluation the loss is the model's."""
    model = llama(1).eval()
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, want = compiled(model, logits=logits), model(input_ids=ids, labels=ids)
        got = ours(input_ids=ids)
        torch.testing.assert_close(got.logits, want.logits)
        assert got.loss is None
        loss = ours(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, want.loss)
    assert not loss.requires_grad


CAPPED = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "a cap, tied: Gemma 2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**CAPPED, head_dim=16, num_hidden_layers=1, vocab_size=65, final_logit_softcapping=3.0)
    ),
    "a divisor: Granite": lambda: GraniteForCausalLM(
        GraniteConfig(**CAPPED, num_hidden_layers=1, vocab_size=65, logits_scaling=4.0)
    ),
    "a factor, tied: Cohere": lambda: CohereForCausalLM(
        CohereConfig(**CAPPED, num_hidden_layers=1, vocab_size=65, logit_scale=0.25)
    ),
    "a bias: Phi": lambda: PhiForCausalLM(PhiConfig(**CAPPED, num_hidden_layers=1, vocab_size=65)),
}


class LossAlone(nn.Module):
    """A model of transformers without its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch, use_cache=False).loss


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_of_heads(family, dtype):
    """Unmodified models: loss and all gradients as good as eager's, against float64. C32 where the head is tied."""
    torch.manual_seed(0)
    model = FAMILIES[family]().train().to(dtype)
    ids = torch.randint(3, 65, (2, 12), generator=torch.Generator().manual_seed(0))
    with recording() as found:
        whole_model_agrees(LossAlone(model), {"input_ids": ids, "labels": ids}, seeds=1, logits="never")
    assert heads(found) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_narrow_loss(reduction):
    """Without an upcast the loss has the logits' dtype, and is not worse than eager's."""

    class Narrow(Model):
        def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.hidden(x))
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **self.options), logits

    torch.manual_seed(0)
    model, (x, targets) = Narrow(lambda z: z, True, reduction=reduction).bfloat16(), batch()
    x = x.bfloat16()
    with recording() as found:
        loss = compiled(model, logits="never")(x, targets)[0]
    assert heads(found) == 1
    wide, eager = copy.deepcopy(model).double()(x.double(), targets)[0], model(x, targets)[0]
    assert loss.dtype == eager.dtype == torch.bfloat16
    assert relative_error(loss.detach(), wide.detach()) <= relative_error(eager.detach(), wide.detach()) + 2**-9
    assert loss.requires_grad


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_frozen_head_has_no_gradient_computed(memory, monkeypatch):
    """C24: the weight's gradient is no GEMM that runs."""
    done: list[str] = []
    monkeypatch.setattr(head_run, "weight_gradient", lambda *a: done.append("weight"))
    torch.manual_seed(0)
    model = Model(lambda z: z)
    model.head.requires_grad_(False)
    expect(model, 1, memory=memory)
    assert not done
    (head,) = explain(model, *batch(), options={"logits": "never", "memory": memory}).parts[-1:]
    assert head.backward.gemms == (1 if memory == "fast" else 2)  # where they are computed again, one more
    assert head.backward.weight_gradient_bytes == 0


def test_a_target_that_is_no_column_is_told_of_in_a_compiled_graph(monkeypatch):
    """In checked mode, also where a compiler traces the head; without it, the loss is NaN."""
    torch.manual_seed(0)
    model, (x, targets) = Model(lambda z: z), batch()
    targets[1, 2] = 65
    for inner in ("eager", "aot_eager"):
        assert compiled(model, logits="never", inner=inner)(x, targets)[0].isnan()
    monkeypatch.setenv("CODETTA_CHECK", "1")
    with pytest.raises(ShapeError, match="target 65 at token 11 is no column of a vocabulary of 65"):
        compiled(model, logits="never")(x, targets)
    assert compiled(model, logits="never", inner="aot_eager")(x, targets)[0].isnan()  # no value is known while tracing


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
