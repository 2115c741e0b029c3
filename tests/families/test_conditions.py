"""The conditions of docs/conditions.md on whole models: where one can reach Llama, Gemma 2, Qwen3 or GPT-2. Each test
is quick with one of them at most, and slow with the others."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from codetta.audit.explain import explain
from codetta.audit.families import FAMILIES, subject
from codetta.audit.models import Subject
from codetta.audit.verify import check
from codetta.capture.backend import recording
from codetta.testing import Bar, relative_error
from features.test_precision import BAR as AUTOCAST_BAR
from features.test_precision import Autocast
from features.training import CLOSE, compile_, tokens

NAMES = ("llama", "gemma2", "qwen3", "gpt2")
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 5, 9, 2, 3, 4], [2, 9, 5, 0, 1, 0, 3, 2, 1, 0, 1, 2]])  # in no order
IGNORED = -100


def every_family(quick: str, argument: str = "name") -> pytest.MarkDecorator:
    """Runs a test with each family; ``pair`` is made of its name."""
    cases = [n if n == quick else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
    return pytest.mark.parametrize(argument, cases, indirect=argument == "pair")


def given(monkeypatch, name, dtype, prepare=lambda model: None, shape=(2, 12), **changes) -> Subject:
    """A family's tiny model with other sizes, prepared for each seed, and a batch of this shape."""
    torch._dynamo.reset()
    family = FAMILIES[name]
    monkeypatch.setitem(FAMILIES, name, replace(family, tiny={**family.tiny, **changes}))
    monkeypatch.setattr("codetta.audit.families.TINY_TOKENS", shape)
    found = subject(name, dtype, tiny=True)

    def renew(seed: int) -> dict[str, Tensor]:
        batch = found.renew(seed)
        with torch.no_grad():
            prepare(found.model)
        return batch

    return replace(found, batch=renew(0), renew=renew)


def clears_the_bar(what: Subject, bar: Bar | None = None, seeds: int = 5) -> None:
    """Outputs and gradients of all parameters, against float64 and eager."""
    found = check(what, seeds=seeds, bar=bar)
    assert len(found.tensors) > 15
    assert not found.problems, "\n".join(found.problems)


def large(model) -> None:
    """A stream of magnitude 3e4 from the first layer on, and gains of about 4."""
    table = model.get_input_embeddings() if model.config.model_type != "gpt2" else model.transformer.wpe
    scale = model.config.hidden_size**0.5 if model.config.model_type == "gemma2" else 1.0
    table.weight.copy_(table.weight.sign() * 3e4 / scale)
    for name, p in model.named_parameters():
        if p.dim() == 1 and "weight" in name:
            p.add_(3.0)


ODD = {
    "hidden_size": 72,
    "intermediate_size": 97,
    "vocab_size": 129,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
}


@every_family("gemma2")
def test_odd_sizes(name, monkeypatch):
    """C02, C03, C15: widths that no tile divides; 2 query heads and 1 key head of 128; sequences of 3 tokens."""
    sizes = {"n_embd": 100, "n_inner": 97, "vocab_size": 129} if name == "gpt2" else ODD
    clears_the_bar(given(monkeypatch, name, torch.bfloat16, shape=(6, 3), **sizes))


@every_family("llama")
def test_large_stream_of_float16(name, monkeypatch):
    """C01, C33: sums of squares, and products with the gain that are stored before the row scale, would overflow."""
    what = given(monkeypatch, name, torch.float16, large, tie_word_embeddings=False)
    stream = what.model(**what.batch, output_hidden_states=True).hidden_states[0]
    assert 2e4 < stream.abs().max() < 6e4

    def renew(seed: int) -> dict[str, object]:
        # a loss large enough that the stream's gradient, divided by 3e4, is a normal number of float16
        return {**what.renew(seed), "num_items_in_batch": 0.05}

    clears_the_bar(replace(what, renew=renew))


@every_family("qwen3")
def test_autocast(name, monkeypatch):
    """C04, C23: float32 parameters, gains and stream, their gradients in float32."""
    found = given(monkeypatch, name, torch.float32)
    clears_the_bar(replace(found, model=Autocast(found.model)), AUTOCAST_BAR, seeds=10)


@every_family("qwen3")
def test_where_the_model_rounds(name, monkeypatch):
    """C09: Llama's and Qwen3's norms round before the gain, the others' after it; ``explain`` tells. Both errors are in
    each test of bfloat16 here."""
    found = given(monkeypatch, name, torch.bfloat16)
    told = any("rounds to bf16 before the gain" in n for n in explain(found.model, found.batch).notes)
    assert told == (name in ("llama", "qwen3"))


@every_family("gpt2")
def test_activations_far_from_zero(name, monkeypatch):
    """C14: SiLU and tanh-GELU of thousands."""

    def far(model) -> None:
        for parameter, p in model.named_parameters():
            if any(word in parameter for word in ("gate_proj.weight", "c_fc.weight")):
                p.mul_(1e4)

    what = given(monkeypatch, name, torch.float32, far)
    seen = []
    first = next(m for n, m in what.model.named_modules() if n.endswith(("gate_proj", "c_fc")))
    handle = first.register_forward_hook(lambda module, args, y: seen.append(y.abs().max().item()))
    what.model(**what.batch)
    handle.remove()
    assert seen[0] > 1000
    clears_the_bar(what, Bar(factor=2.0, units=64, mean=1.5))  # such a model is chaotic; a wrong form is off by 1e-3


# --- steps of one compiled model, against the same model in float64 ---------------------------------------------------


@pytest.fixture
def pair(request, monkeypatch):
    """A compiled model in float32, and its copy in float64."""
    model = given(monkeypatch, request.param, torch.float32).model
    exact = copy.deepcopy(model).double()
    return compile_(model), exact


def gradients(model, scale=1.0, **batch) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss, or the sum of the logits, and the gradient of each parameter."""
    out = model(**batch)
    total = out.logits.sum() if out.loss is None else out.loss * scale
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True) if wanted else ()
    return total.detach(), dict(zip(wanted, found, strict=True))


def assert_same(ours, exact, bound=2 * CLOSE) -> None:
    """One value and the same gradients. What is zero in exact arithmetic (a key's bias, scores of a single token) is
    noise, far below the largest gradient."""
    assert relative_error(ours[0], exact[0]) < bound
    assert ours[1].keys() == exact[1].keys()
    largest = max((g.norm().item() for g in exact[1].values() if g is not None), default=0.0)
    for name, g in exact[1].items():
        assert (ours[1][name] is None) == (g is None), name
        if g is not None and g.norm() < 1e-9 * largest:
            assert ours[1][name].norm() < 1e-6 * largest, name
        elif g is not None:
            assert relative_error(ours[1][name], g) < bound, name


@every_family("gpt2", "pair")
def test_targets_and_counts(pair):
    """C25, C26, C32: a quarter of the targets ignored, on the first and the second call; micro-batches of 3 and 9 valid
    tokens, divided by all 12 (a tensor, whose value is not read), sum up to one batch. GPT-2's and Gemma's head is
    their embedding."""
    model, exact = pair
    ids = tokens()
    labels = ids.masked_fill(torch.arange(12) % 4 == 1, IGNORED)
    for _ in range(2):
        assert_same(*(gradients(m, input_ids=ids, labels=labels) for m in pair))
    few = ids.clone()
    few[0, 4:], few[1, 10:] = IGNORED, IGNORED
    items = torch.tensor(12)
    with recording() as found:
        parts = [gradients(model, input_ids=ids[i], labels=few[i], num_items_in_batch=items) for i in ([0], [1])]
    ops = {str(n.target) for g in found for n in g.gm.graph.nodes if n.op == "call_function"}
    assert ops.isdisjoint({"aten.item.default", "aten._local_scalar_dense.default"})
    assert len(ops) > 10
    together = sum(p[0] for p in parts), {n: parts[0][1][n] + parts[1][1][n] for n in parts[0][1]}
    assert_same(together, gradients(exact, input_ids=ids, labels=few, num_items_in_batch=12))


@every_family("none: Llama's is in tests/cases", "pair")
def test_positions(pair):
    """C16, C18: positions in no order, of each sample, and shared by all. Where positions agree, so do the results."""
    model, _ = pair
    ids = tokens()
    for positions in (PACKED, PACKED[:1]):
        assert_same(*(gradients(m, input_ids=ids, labels=ids, position_ids=positions) for m in pair))
    shared, sample = (model(input_ids=ids, position_ids=p).logits for p in (PACKED[:1], PACKED[:1].expand(2, -1)))
    torch.testing.assert_close(shared, sample, rtol=1e-6, atol=1e-6)


@every_family("none: Llama's is in tests/cases", "pair")
def test_sizes_that_change(pair):
    """C10, C11, C29: one token, and more; the gradient of a sum, which is expanded. One graph serves all sizes above
    one."""
    model, exact = pair
    with recording() as found:
        for shape in ((2, 7), (2, 12), (3, 9), (1, 1), (4, 6)):
            assert_same(*(gradients(m, input_ids=tokens(1, shape)) for m in (model, exact)))
    assert len(found) <= 4


@every_family("gemma2", "pair")
@pytest.mark.parametrize("trained", ["norms and biases", pytest.param("nothing", marks=pytest.mark.slow)])
def test_parts_that_are_trained(pair, trained):
    """C24: exactly the gradients that are asked for; the same loss without any, and under inference_mode."""
    model, _ = pair
    for m in pair:
        for p in m.parameters():
            p.requires_grad_(trained != "nothing" and p.dim() == 1)
    ids = tokens()
    ours, exact = (gradients(m, input_ids=ids, labels=ids) for m in pair)
    assert_same(ours, exact)
    assert (len(ours[1]) == 0) == (trained == "nothing")
    if trained == "nothing":
        with torch.inference_mode():
            assert relative_error(model(input_ids=ids, labels=ids).loss, exact[0]) < CLOSE
