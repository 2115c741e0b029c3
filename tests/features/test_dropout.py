"""Dropout: the captured graph in float64, eager and compiled code draw the same numbers in the same order."""

import copy

import pytest
import torch

from codetta.audit.runs import float64_step
from codetta.testing import relative_error
from features.training import (
    CLOSE,
    REGIMES,
    Recipe,
    assert_same_step,
    assert_same_training,
    compile_,
    gemms_compiled,
    gpt2,
    step,
    tokens,
    train,
)


def other_masks(found, model):
    """Whether a step of the model with other random numbers is another step."""
    torch.manual_seed(8)
    return abs(model(input_ids=tokens(), labels=tokens()).loss.item() - found[0].item()) > 1e-4


@pytest.mark.parametrize("regime", REGIMES)
def test_same_masks_as_eager(regime):
    model = gpt2()
    eager = step(model)
    assert other_masks(eager, model)
    with gemms_compiled():
        assert_same_step(step(compile_(model, regime)), eager)


def test_same_masks_as_the_oracle():
    model = gpt2()
    ours = step(compile_(copy.deepcopy(model)))
    torch._dynamo.reset()
    oracle = float64_step(model)
    torch.manual_seed(7)
    exact = oracle({"input_ids": tokens(), "labels": tokens()}, 0)
    assert exact.outputs["loss"].dtype is torch.float64
    assert_same_step(ours, (exact.outputs["loss"], exact.gradients))
    assert_same_step(step(model.double()), (exact.outputs["loss"], exact.gradients))


def test_training():
    """Masks stay in step over several steps."""
    model = gpt2(0.2)
    eager = train(copy.deepcopy(model), Recipe(steps=3))
    assert_same_training(train(compile_(model), Recipe(steps=3)), eager)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("regime", REGIMES)
def test_checkpoints_draw_the_same_numbers_again(regime, reentrant):
    """What a checkpoint computes again in backward has the masks of forward: those of a model without checkpoints."""
    model = gpt2()
    eager = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with gemms_compiled():
        assert_same_step(step(compile_(model, regime)), eager)


def test_none_in_evaluation():
    """The same compiled model draws nothing once it is in evaluation mode."""
    model = compile_(gpt2())
    drawn = step(model)[0]
    model.eval()
    state = torch.get_rng_state()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    assert torch.equal(state, torch.get_rng_state())
    expected = gpt2(0.0)(input_ids=tokens(), labels=tokens()).loss
    assert relative_error(loss, expected) < CLOSE
    assert relative_error(loss, drawn) > 1e-4
