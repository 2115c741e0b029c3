"""The LM head and its loss: reductions, ignored targets, vocabularies, biases, ties, and who sees the logits."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

import ways
from codetta.capture.backend import CapturedGraph, recording
from codetta.errors import CodettaError
from codetta.testing import relative_error
from ways import agree, compiled, counts, forward_plans, fresh, llama, placed, settled, whole_model_agrees, wide

IGNORED = -100
ANY_HEAD = pytest.mark.parametrize("logits", ["never", "always"])  # a loss head of ours, or the model's own logits
REDUCTIONS = ["sum", "mean", "none"]


class Head(nn.Module):
    """A norm, the LM head and its cross-entropy in float32; ``narrow`` is autocast's dtype, if it is on."""

    def __init__(
        self,
        vocabulary: int = 257,
        width: int = 24,
        bias: bool = False,
        reduction: str = "mean",
        ignore: int = IGNORED,
        narrow: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=bias)
        self.reduction, self.ignore, self.narrow = reduction, ignore, narrow

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.narrow or torch.bfloat16, enabled=self.narrow is not None):
            logits = wide(self.head(self.norm(x))).flatten(0, -2)
            return functional.cross_entropy(
                logits, targets.flatten(), ignore_index=self.ignore, reduction=self.reduction
            )


def batch(
    rows: int = 12,
    width: int = 24,
    vocabulary: int = 257,
    ignored: slice = slice(0),
    ignore: int = IGNORED,
    dtype: torch.dtype = torch.float32,
):
    """Draws activations and targets; those of the slice are ignored."""

    def draw(generator: torch.Generator) -> list[Tensor]:
        x = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
        targets = torch.randint(0, vocabulary, (rows,), generator=generator)
        targets[ignored] = ignore
        return [x, targets]

    return draw


def expect(found: list[CapturedGraph], logits: str, programs: dict[str, int]) -> None:
    """One loss head, or segments of these programs."""
    assert [len(g.heads) for g in found] == [int(logits == "never")] * len(found)
    if logits == "always":
        assert counts(forward_plans(found)) == programs


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore", [IGNORED, 3])
@ANY_HEAD
def test_a_quarter_ignored(logits, reduction, dtype, ignore):
    """C25: a quarter of the targets ignored, on the first call and on later ones; a class of the vocabulary may be the
    ignored one. The epilogue reduces the logits, and nothing of them is left over."""
    module = Head(reduction=reduction, ignore=ignore).to(dtype)
    draw = batch(96, ignored=slice(None, None, 4), ignore=ignore, dtype=dtype)
    found = agree(module, draw, gemms=1, logits=logits)
    expect(found, logits, {"gemms": 1, "epilogues": 1, "finalizes": 1, "leftovers": 1})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@ANY_HEAD
def test_every_token_weighs_its_own_upstream_value(logits, dtype):
    """C20: reduction none with the upstream gradient [1, 2, 0, 0.5, 3], the first token ignored; weight and bias need
    gradients too."""
    module = Head(bias=True, reduction="none").to(dtype)
    upstream = [torch.tensor([1, 2, 0, 0.5, 3])]
    agree(module, batch(5, ignored=slice(1), dtype=dtype), upstream=upstream, gemms=1, logits=logits)
    fresh(module, 0)
    x, targets = batch(5, ignored=slice(1), dtype=dtype)(torch.Generator())
    losses = compiled(module, logits=logits)(x, targets)
    (dx,) = torch.autograd.grad(losses, x, upstream[0].to(losses.dtype))
    assert losses[0] == 0.0
    assert not dx[[0, 2]].any()
    assert all(dx[i].any() for i in (1, 3, 4))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@ANY_HEAD
def test_upstream_gradient_of_a_reduced_loss(logits, reduction):
    """C20, C10: a loss scaled by what follows it, and a sum of single losses whose gradient is expanded."""

    class Scaled(Head):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return super().forward(x, targets).sum() * 0.125

    found = agree(Scaled(reduction=reduction).double(), batch(dtype=torch.float64), gemms=1, logits=logits)
    expect(found, logits, {"gemms": 1, "epilogues": 1, "finalizes": 1, "leftovers": 1})


@pytest.mark.parametrize("reduction", REDUCTIONS)
@ANY_HEAD
def test_all_targets_ignored(logits, reduction):
    """C27: with no target left the mean is NaN with gradients of zero, the sum is 0, and single losses are zeros."""
    module = Head(bias=True, reduction=reduction)
    found = agree(module, batch(ignored=slice(None)), seeds=2, gemms=1, logits=logits)
    x, targets = batch(ignored=slice(None))(torch.Generator())
    loss = compiled(module, logits=logits)(x, targets)
    gradients = torch.autograd.grad(loss.sum(), [x, *module.parameters()])
    assert bool(loss.isnan()) if reduction == "mean" else not loss.any()
    assert all(not g.any() for g in gradients)
    assert found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@ANY_HEAD
def test_no_tokens(logits, shape, reduction, dtype):
    """C13: a loss over no tokens: NaN, 0 or empty, as PyTorch gives it, and zero gradients of the right dtype."""
    module = Head(bias=True, reduction=reduction).to(dtype)
    fresh(module, 0)
    x = torch.empty(*shape, 24, dtype=dtype, requires_grad=True)
    targets = torch.empty(shape, dtype=torch.long)
    expected = module(x, targets)
    with recording() as found:
        loss = compiled(module, logits=logits)(x, targets)
    assert sum(len(g.heads) for g in found) + counts(forward_plans(found))["gemms"] == 1
    torch.testing.assert_close(loss, expected, equal_nan=True)
    loss.sum().backward()
    for name, p in [("x", x), *module.named_parameters()]:
        assert (p.grad.shape, p.grad.dtype) == (p.shape, dtype), name
        assert not p.grad.any(), name


@pytest.mark.parametrize("vocabulary", [129, 257, 1001, 129_920])
def test_vocabulary_that_is_no_multiple_of_a_tile(vocabulary):
    """C21: logits near -100. A log-probability is never above 0, and the columns that fill up the last tile take no
    probability."""

    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, vocabulary, bias=False)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(x) - 100.0, targets, reduction="none")

    found = agree(Low(), batch(5, 8, vocabulary), seeds=2, gemms=1)
    assert counts(forward_plans(found)) == {"gemms": 1, "epilogues": 1, "finalizes": 1, "leftovers": 0}
    losses = compiled(settled(Low()))(*map(placed, batch(5, 8, vocabulary)(torch.Generator())))
    assert bool((losses >= 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@ANY_HEAD
def test_large_bias_over_several_tiles_of_the_vocabulary(logits, dtype):
    """C22: a bias of about 50, random, over eight tiles: the loss is not negative, and the bias's gradient is the sum
    of the logits' gradients over the tokens."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(24, 1001)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(x), targets, reduction="sum")

    def large(m: nn.Module, seed: int) -> None:
        fresh(m, seed)
        with torch.no_grad():
            m.head.bias.mul_(50.0)

    module = Biased().to(dtype)
    found = agree(module, batch(vocabulary=1001, dtype=dtype), prepare=large, gemms=1, logits=logits)
    expect(found, logits, {"gemms": 1, "epilogues": 1, "finalizes": 1, "leftovers": 0})
    module = settled(Biased())
    large(module, 0)
    x, targets = map(placed, batch(vocabulary=1001)(torch.Generator()))
    loss = compiled(module, logits=logits)(x, targets)
    (gradient,) = torch.autograd.grad(loss, module.head.bias)
    exact = torch.softmax(copy.deepcopy(module).double().head(x.double()), -1).sum(0)
    exact -= torch.bincount(targets, minlength=1001)
    assert loss >= 0
    assert relative_error(gradient, exact) < 1e-5


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@ANY_HEAD
def test_autocast_with_float32_parameters(logits, narrow, bias):
    """C23: it runs, and the gradients have the parameters' dtype."""
    agree(Head(bias=bias, narrow=narrow), batch(48), wide=Head(bias=bias), gemms=1, logits=logits)


def test_float16_under_a_gradient_scaler():
    """C23: float16 autocast with PyTorch's own scaler. Steps equal eager's; where the scaled gradients overflow, both
    skip the step and lower the scale."""

    def trained(call: Callable[[nn.Module], Callable[..., Tensor]]) -> tuple[list[float], list[Tensor]]:
        module = settled(Head(bias=True, narrow=torch.float16))
        fresh(module, 0)
        f, scaler = call(module), torch.amp.GradScaler(ways.DEVICE, init_scale=2.0**12)
        optimizer, scales = torch.optim.SGD(module.parameters(), lr=0.5), []
        for i, scale in enumerate((None, None, 2.0**40, 2.0**12)):
            x, targets = (placed(t) for t in batch(48)(torch.Generator().manual_seed(i)))
            if scale is not None:
                scaler.update(scale)
            scaler.scale(f(x, targets)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, [p.detach() for p in module.parameters()]

    (ours, weights), (theirs, eager) = trained(compiled), trained(lambda module: module)
    assert ours == theirs == [2.0**12, 2.0**12, 2.0**39, 2.0**12]
    assert all(relative_error(a, b) < 2**-9 for a, b in zip(weights, eager, strict=True))


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_parts_of_a_batch(reduction, dtype, most):
    """C19: 4096 tokens at once or in parts of 32, 1000 or 2048, ignored tokens unevenly spread: one loss, one
    gradient. How a kernel divides its rows is its own affair."""
    module = settled(Head(reduction=reduction).to(dtype))
    fresh(module, 0)
    x, targets = (placed(t).detach() for t in batch(4096, ignored=slice(0, 700, 2), dtype=dtype)(torch.Generator()))
    f, weight = compiled(module), torch.ones(4096, device=x.device)

    def found(size: int) -> tuple[Tensor, Tensor]:
        loss, gradient = torch.zeros((), device=x.device), torch.zeros_like(module.head.weight, dtype=torch.float32)
        for a, t, g in zip(x.split(size), targets.split(size), weight.split(size), strict=True):
            part = f(a, t) * (g if reduction == "none" else (t != IGNORED).sum() if reduction == "mean" else 1.0)
            if (t != IGNORED).any():
                gradient += torch.autograd.grad(part.sum(), module.head.weight)[0]
                loss += part.detach().sum()
        return loss, gradient

    whole = found(4096)
    for size in (32, 1000, 2048):
        assert all(relative_error(a, b) < most for a, b in zip(found(size), whole, strict=True)), size


@pytest.mark.parametrize("given", ["int", "tensor"])
def test_number_of_items_in_the_batch(given):
    """C26: two micro-batches of 3 and 9 valid tokens, their losses divided by all 12: the gradients sum up to those of
    one batch."""
    model = llama(1)
    ids = torch.randint(0, 128, (2, 10), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 4:] = IGNORED  # the first token of each row has no prediction
    ours = compiled(model)

    def gradients(rows: slice) -> list[Tensor]:
        items = torch.tensor(12) if given == "tensor" else 12
        loss = ours(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=items).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    whole, parts = gradients(slice(2)), [gradients(slice(1)), gradients(slice(1, 2))]
    for one, a, b in zip(whole, *parts, strict=True):
        assert relative_error(a + b, one) < 5e-6
    model.double()
    model.model.rotary_emb.double()
    loss = model(input_ids=ids, labels=labels, num_items_in_batch=12).loss
    for one, exact in zip(whole, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        assert relative_error(one, exact) < 1e-4  # the model keeps some float32 in float64


# --- ties -------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the LM head too, without transformers."""

    def __init__(self, vocabulary: int = 65, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden, self.norm = nn.Linear(width, width, bias=False), nn.RMSNorm(width, eps=1e-5)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.hidden(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(wide(logits), targets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tied_embedding(dtype):
    """C32: the gradient of a tied embedding and head is the sum of both uses, in the weight's dtype. Tokens that are no
    target are read by the embedding alone, and the reverse."""
    module = Tied().to(dtype)

    def draw(generator: torch.Generator) -> list[Tensor]:
        return [torch.randint(0, 30, (12,), generator=generator), torch.randint(20, 65, (12,), generator=generator)]

    agree(module, draw, gemms=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_model(dtype):
    """C32: a Llama of transformers with tied weights."""
    model = llama(1, dtype, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(2))
    whole_model_agrees(model, {"input_ids": ids, "labels": ids})


# --- who sees the logits ----------------------------------------------------------------------------------------------


def step(f, model, ids, through_logits=False):
    """The loss, the logits, and the gradients; ``through_logits`` adds a term of the logits to the loss."""
    out = f(input_ids=ids, labels=ids)
    loss = out.loss + out.logits.float().square().mean() if through_logits else out.loss
    return loss.detach(), out.logits, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("through_logits", [False, True])
@pytest.mark.parametrize("logits", ["auto", "always"])
def test_logits_are_returned(logits, through_logits):
    """Logits as the model returns them; who differentiates them gets their gradients too."""
    model = llama(1)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(3))
    loss, theirs, expected = step(model, model, ids, through_logits)
    got, ours, found = step(compiled(model, logits=logits), model, ids, through_logits)
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-5


USES = {
    "add": lambda x: x + 1,
    "radd": lambda x: torch.ones(3) + x,
    "sum": lambda x: x.sum(),
    "argmax": lambda x: torch.argmax(x, -1),
    "index": lambda x: x[:, -1],
    "float": float,
    "bool": bool,
    "iterate": list,
    "len": len,
    "shape": lambda x: x.shape,
    "size": lambda x: x.size(),
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "requires_grad": lambda x: x.requires_grad,
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "backward": lambda x: x.backward(),
    "detach": lambda x: x.detach(),
    "clone": torch.clone,
    "write": lambda x: x.add_(1),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
}


def test_logits_that_are_never_returned():
    """In place of the logits stands what raises at every use and says why; it can be printed. Loss and gradients are
    those of the model, and no program gives the logits away."""
    model = llama(1)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(3))
    loss, _, expected = step(model, model, ids)
    with recording() as found:
        got, logits, gradients = step(compiled(model, logits="never"), model, ids)
    torch.testing.assert_close(got, loss)
    for a, b in zip(gradients, expected, strict=True):
        assert relative_error(a, b) < 1e-5
    for use in USES.values():
        with pytest.raises(CodettaError, match="'logits': 'never'"):
            use(logits)
    assert "never" in repr(logits)
    assert "never" in str(logits)
    returned = {n.type.cols for s in found[0].capture.segments for n in s.graph.roots}
    assert 128 not in returned


def test_unknown_choice_of_logits():
    """The option names what there is."""
    with pytest.raises(BackendCompilerFailed, match=r"SettingsError(.|\n)*one of 'auto', 'always', 'never'"):
        compiled(llama(1), logits="sometimes")(input_ids=torch.zeros(1, 3, dtype=torch.long))
