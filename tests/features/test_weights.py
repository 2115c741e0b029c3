"""The model stays the user's: its names, its copies, its checkpoints and its ties, compiled or not."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from features.training import (
    REGIMES,
    Recipe,
    assert_same_step,
    assert_same_training,
    compile_,
    gemms_compiled,
    step,
    tokens,
    train,
)
from ways import llama

SHORT = Recipe(steps=2)
ADAM = Recipe(steps=2, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3, eps=1e-6))


def same_state(a, b):
    assert list(a) == list(b)
    assert [n for n in b if not torch.equal(a[n], b[n])] == []


@pytest.mark.parametrize("regime, pack", [("whole", True), ("blocks", False)])
def test_state_dict(regime, pack):
    """A step changes neither the names of the state nor its values, nor which tensors the parameters are."""
    model = llama(tie_word_embeddings=True)
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    with gemms_compiled():
        step(compile_(model, regime, pack=pack))
    same_state(model.state_dict(), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    wrapped = torch.compile(model, backend="codetta")  # PyTorch's own prefix, nothing of ours
    assert [n.removeprefix("_orig_mod.") for n in wrapped.state_dict()] == list(before)


def test_a_checkpoint_is_read_by_an_uncompiled_model(tmp_path):
    """Trained compiled, saved by PyTorch and by transformers, read by models that were never compiled."""
    model = compile_(llama(), pack=True)
    trained = train(model, SHORT)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model.save_pretrained(tmp_path)
    plain = llama()
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    read = LlamaForCausalLM.from_pretrained(tmp_path).train()
    for other in (plain, read):
        same_state(other.state_dict(), model.state_dict())
        same_state(dict(other.named_parameters()), trained.weights)
        assert_same_step(step(model), step(other))


@pytest.mark.parametrize("assign", [False, True])
def test_a_compiled_model_reads_a_checkpoint(assign):
    """Loading into a model that has already run compiled, in place or by other tensors: it computes with the new
    weights."""
    model, other = compile_(llama(), pack=True), llama()
    old = step(model)
    train(other, SHORT)
    expected = step(other)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert_same_step(step(model), expected)
    assert abs(old[0] - expected[0]) > 1e-3


def test_training_is_resumed(tmp_path):
    """Two steps, a checkpoint of model and optimizer, two more in another compiled model: as four of eager in a row."""
    eager = llama()
    optimizer = ADAM.optimizer(list(eager.parameters()))
    for first in (0, 2):
        straight = train(eager, Recipe(steps=2, first_batch=first), optimizer)
    model = compile_(llama())
    optimizer = ADAM.optimizer(list(model.parameters()))
    train(model, SHORT, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    model = compile_(llama())
    model.load_state_dict(state["model"])
    optimizer = ADAM.optimizer(list(model.parameters()))
    optimizer.load_state_dict(state["optimizer"])
    assert_same_training(train(model, Recipe(steps=2, first_batch=2), optimizer), straight, bound=1e-4)


@pytest.mark.parametrize("pack", [False, True])
def test_deepcopy(pack):
    """A copy of a compiled model that has run: equal, independent, and trained as eager trains."""
    model = compile_(llama(), pack=pack)
    train(model, SHORT)
    twin, eager = copy.deepcopy(model), llama()
    eager.load_state_dict(model.state_dict())
    same_state(twin.state_dict(), model.state_dict())
    before = copy.deepcopy(model.state_dict())
    with gemms_compiled():
        found = train(compile_(twin, pack=pack), SHORT)
    assert_same_training(found, train(eager, SHORT))
    same_state(model.state_dict(), before)  # the twin's training left the model alone
    assert {p.untyped_storage().data_ptr() for p in twin.parameters()}.isdisjoint(
        p.untyped_storage().data_ptr() for p in model.parameters()
    )


@pytest.mark.parametrize("regime", REGIMES)
def test_tied_weights(tmp_path, regime):
    """Embedding and head are one Parameter before and after training, with one gradient and one entry of the optimizer;
    the checkpoint ties again."""
    model = llama(tie_word_embeddings=True)
    eager = train(copy.deepcopy(model), SHORT)
    with gemms_compiled():
        ours = train(compile_(model, regime), SHORT)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in ours.weights
    assert_same_training(ours, eager)
    model.save_pretrained(tmp_path)
    read = LlamaForCausalLM.from_pretrained(tmp_path).train()
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert_same_step(step(model, tokens(5)), step(read, tokens(5)))
