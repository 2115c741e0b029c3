"""Evaluation: no gradients, other modes in between, and generation with a cache."""

import copy

import pytest
import torch

from codetta.testing import relative_error
from features.training import CLOSE, assert_same_step, compile_, gemms_compiled, step, tokens
from ways import llama

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "eval": torch.enable_grad}


@pytest.mark.parametrize("mode, regime", [*((mode, "whole") for mode in MODES), ("no_grad", "blocks")])
def test_modes(mode, regime):
    """A model that is first run in this mode, then trained, then run in this mode again, as an evaluation loop does it:
    loss and logits are those of float64, and training is not disturbed."""
    model = llama()
    exact = copy.deepcopy(model).double()
    eager = step(copy.deepcopy(model))
    compile_(model, regime)
    with gemms_compiled():
        for training in (False, True, False):
            model.train(training)
            if training:
                assert_same_step(step(model), eager)
                continue
            with MODES[mode]():
                found, expected = (m(input_ids=tokens(3), labels=tokens(3)) for m in (model, exact))
            assert found.logits.requires_grad == (mode == "eval")
            assert found.logits.is_inference() == (mode == "inference_mode")
            assert relative_error(found.loss, expected.loss) < CLOSE
            assert relative_error(found.logits, expected.logits) < CLOSE


def test_generation():
    """transformers' ``generate``, greedy, with its cache: the same tokens, prompt and steps both compiled."""
    model = llama(use_cache=True).eval()
    ids = tokens()
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
    torch._dynamo.reset()
    model.compile(backend="codetta")
    with gemms_compiled():
        found = model.generate(ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert relative_error(a, b) < CLOSE
