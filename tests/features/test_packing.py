"""Documents packed into one row, told apart by position ids that start again: each as if it were alone."""

import copy

import pytest
import torch

from codetta.testing import relative_error
from features.training import CLOSE, REGIMES, compile_, gemms_compiled, tokens
from ways import llama

LENGTHS = (5, 7, 1, 11)


def packed():
    """A row of documents, the positions inside them, and labels in which no document predicts the next one's start."""
    ids = tokens(0, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, positions, ids.masked_fill(positions == 0, -100)


def alone(model):
    """The summed loss of the documents, each run alone, its logits, and the gradients, in float64."""
    total, logits = torch.zeros((), dtype=torch.float64), []
    for part in packed()[0].split(LENGTHS, 1):
        out = model(input_ids=part)
        logits.append(out.logits[0])
        total += torch.nn.functional.cross_entropy(out.logits[0, :-1].double(), part[0, 1:], reduction="sum")
    return total.detach(), torch.cat(logits), torch.autograd.grad(total, list(model.parameters()))


@pytest.mark.parametrize("regime", REGIMES)
def test_each_document_as_if_alone(regime):
    model = llama()
    loss, logits, gradients = alone(copy.deepcopy(model).double())
    ids, positions, labels = packed()
    compile_(model, regime)
    with gemms_compiled():
        out = model(input_ids=ids, position_ids=positions, labels=labels, num_items_in_batch=1)
    assert relative_error(out.loss, loss) < CLOSE
    assert relative_error(out.logits[0], logits) < CLOSE
    found = torch.autograd.grad(out.loss, list(model.parameters()))
    for (name, _), a, b in zip(model.named_parameters(), found, gradients, strict=True):
        assert relative_error(a, b) < CLOSE, name
    together = model(input_ids=ids, labels=labels, num_items_in_batch=1)
    assert relative_error(together.loss, loss) > 1e-3  # the positions are what tells them apart


def test_padding():
    """Rows of different lengths, padded on either side: what is real is as if it were alone."""
    model = llama()
    exact = copy.deepcopy(model).double()
    compile_(model)
    ids, mask = tokens(1, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:], mask[1, :2] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    for row in range(2):
        real = mask[row].bool()
        assert relative_error(logits[row, real], exact(input_ids=ids[row, real][None]).logits[0]) < CLOSE
