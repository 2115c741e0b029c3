"""Parts that do not train: frozen layers, frozen kinds of parameters, and low-rank adapters on a frozen model."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from codetta.testing import relative_error
from features.training import (
    CLOSE,
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
from ways import backward_plans, llama

FROZEN = {
    "lower half": lambda name: "embed" in name or "layers.0" in name,
    "upper half": lambda name: "layers.1" in name or "lm_head" in name,
    "matrices": lambda name: "norm" not in name,
    "norms": lambda name: "norm" in name,
    "keys": lambda name: "k_proj" in name,  # one of three weights that are stacked
}


@pytest.mark.parametrize("part", FROZEN)
def test_frozen_parts(part):
    """Frozen parameters have no gradient and do not move, the others train as in eager."""
    model = llama()
    for name, p in model.named_parameters():
        p.requires_grad_(not FROZEN[part](name))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    eager = train(copy.deepcopy(model), Recipe(steps=2))
    with gemms_compiled():
        ours = train(compile_(model, pack=True), Recipe(steps=2))
    assert_same_training(ours, eager)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == FROZEN[part](name), name


def test_what_is_frozen_costs_nothing():
    """Without weight gradients and below the lowest trained layer there are no GEMMs in backward."""

    def gemms(part):
        model = llama()
        for name, p in model.named_parameters():
            p.requires_grad_(not FROZEN[part](name))
        with gemms_compiled() as found:
            step(compile_(model))
        return sum(plan.count("gemm") for plan in backward_plans(found))

    # of 8L+2: the head's two and the upper layer's eight, its lowest data gradient being for its own first gain
    assert gemms("lower half") == 2 + 8
    assert gemms("matrices") == 1 + 2 * 4


def test_thawed_after_a_first_step():
    """Freezing is a state that changes: gradual unfreezing compiles again, and trains what is asked for."""
    model = llama()
    eager = copy.deepcopy(model)
    compile_(model)
    for frozen in ("lower half", "matrices", "norms"):
        for m in (model, eager):
            for name, p in m.named_parameters():
                p.requires_grad_(not FROZEN[frozen](name))
        assert_same_step(step(model), step(eager))


def adapted(dropout=0.0, targets=("q_proj", "v_proj", "down_proj"), **more):
    """A Llama with low-rank adapters of PEFT, whose second factors are not zero."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), lora_dropout=dropout, **more)
    return get_peft_model(llama(), LoraConfig(**{**config.to_dict(), "init_lora_weights": False}))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters(dropout, regime):
    """LoRA through PEFT: the adapters train as in eager, the base model has no gradients."""
    model = adapted(dropout)
    eager = train(copy.deepcopy(model), Recipe(steps=2))
    with gemms_compiled():
        ours = train(compile_(model, regime), Recipe(steps=2))
    assert_same_training(ours, eager)
    assert [n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n] == []
    _, gradients = step(model)
    assert len(gradients) == 2 * 2 * 3
    assert all("lora" in n for n in gradients)


@pytest.mark.parametrize(
    "reentrant",
    [pytest.param(False, id="not reentrant"), pytest.param(True, id="reentrant", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("regime", REGIMES)
def test_adapters_of_every_linear_and_checkpoints(regime, reentrant):
    """All seven linears of a block, rank-stabilised, with activation checkpointing. For it PEFT makes the embedding ask
    for a gradient by a hook, which Dynamo takes into no graph: it breaks there."""
    names = [f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")]
    model = adapted(targets=names, use_rslora=True)
    eager = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with gemms_compiled():
        assert_same_step(step(compile_(model, regime, fullgraph=regime == "blocks")), eager)


def test_adapters_come_and_go():
    """Switched off, and merged into the base weights: the compiled model follows."""
    model = adapted()
    expected = step(model)
    with torch.no_grad(), model.disable_adapter():
        base = model(input_ids=tokens(), labels=tokens()).loss
    assert relative_error(base, expected[0]) > 1e-3
    compile_(model)
    assert_same_step(step(model), expected)
    with torch.no_grad(), model.disable_adapter():
        assert relative_error(model(input_ids=tokens(), labels=tokens()).loss, base) < CLOSE
    assert_same_step(step(model), expected)
    merged = model.merge_and_unload()
    assert relative_error(step(compile_(merged.requires_grad_(True)))[0], expected[0]) < CLOSE
