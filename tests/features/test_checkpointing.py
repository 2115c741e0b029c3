"""Reentrant activation checkpointing; the other kind is in tests/cases/test_regimes.py."""

import copy

import pytest

from features.training import (
    REGIMES,
    Recipe,
    assert_same_step,
    assert_same_training,
    compile_,
    gemms_compiled,
    step,
    train,
)
from ways import llama


def reentrant(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


@pytest.mark.parametrize("regime", REGIMES)
def test_step(regime):
    model = llama()
    eager, checkpointed = step(model), step(reentrant(copy.deepcopy(model)))
    assert_same_step(checkpointed, eager)
    with gemms_compiled():
        assert_same_step(step(compile_(reentrant(model), regime)), eager)


def test_training():
    """With accumulation: a second backward pass runs blocks again after their gradients are there."""
    model = llama()
    recipe = Recipe(steps=2, micro_batches=2, clip=0.5)
    eager = train(copy.deepcopy(model), recipe)
    assert_same_training(train(compile_(reentrant(model), "blocks"), recipe), eager)
