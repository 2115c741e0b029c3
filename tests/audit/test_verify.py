"""Verification: right models pass, wrong ones do not, and nothing of the user's changes."""

import json

import pytest
import torch
from torch import nn

from codetta.audit import verify as module
from codetta.audit.models import Request, find
from codetta.audit.runs import Step, compiled_step, poisoned_memory
from codetta.audit.verify import check, varied, verify
from codetta.errors import UnsupportedError, VerifyError


class Block(nn.Module):
    """A norm, two linears and a residual; no loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-5)
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.drop = nn.Dropout(dropout)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.b(nn.functional.silu(self.a(self.norm(x)))))


@pytest.fixture(scope="module")
def llama_in_bf16():
    return check(find(Request("llama-tiny", layers=2, tokens=64, batch=2, dtype="bf16"), weights=True), seeds=2)


def test_a_llama_passes(llama_in_bf16):
    assert llama_in_bf16.ok, str(llama_in_bf16)
    assert llama_in_bf16.ratio < 1
    names = [t.name for t in llama_in_bf16.tensors]
    assert names[:2] == ["loss", "logits"]
    assert "model.layers.1.mlp.down_proj.weight" in names
    json.dumps(llama_in_bf16.to_json())


def test_rows_of_the_head_are_compared_apart(llama_in_bf16):
    names = {t.name for t in llama_in_bf16.tensors}
    assert {"lm_head.weight [target rows]", "lm_head.weight [other rows]"} <= names
    assert "lm_head.weight" not in names
    assert "lm_head.weight [target rows]" in str(llama_in_bf16)


def test_a_model_without_a_loss():
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(48, 32, requires_grad=True)
    found = verify(model, x)
    assert [t.name for t in found.tensors] == ["output", "norm.weight", "a.weight", "a.bias", "b.weight", "x"]
    assert not [t.problem for t in found.tensors if t.problem]
    assert all(p.grad is None for p in [*model.parameters(), x])


def test_under_autocast():
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = verify(Block(), torch.randn(48, 32))
    assert not [t.problem for t in found.tensors if t.problem]
    weight = next(t for t in found.tensors if t.name == "a.weight")
    assert weight.pooled.eager > 1e-4  # it did run in bfloat16


@pytest.mark.parametrize("target", ["a.weight", "output"])
def test_a_wrong_result_is_found(monkeypatch, target):
    def wrong(model, options=None, **chosen):
        right = compiled_step(model, options, **chosen)

        def run(batch, seed):
            step = right(batch, seed)
            return Step(
                {n: x * 1.001 if n == target else x for n, x in step.outputs.items()},
                {n: g * 1.001 if n == target and g is not None else g for n, g in step.gradients.items()},
            )

        return run

    monkeypatch.setattr(module, "compiled_step", wrong)
    torch.manual_seed(0)
    model, x = Block(), torch.randn(48, 32)
    found = verify(model, x, seeds=2)
    assert not found.ok
    assert [t.name for t in found.tensors if t.problem] == [target]
    assert "misses the bar" in str(found)
    with pytest.raises(VerifyError, match=target):
        verify(model, x, seeds=2, raises=True)


def test_a_missing_gradient_is_found(monkeypatch):
    def wrong(model, options=None, **chosen):
        right = compiled_step(model, options, **chosen)

        def run(batch, seed):
            step = right(batch, seed)
            return Step(step.outputs, {**step.gradients, "a.bias": None})

        return run

    monkeypatch.setattr(module, "compiled_step", wrong)
    found = verify(Block(), torch.randn(48, 32), seeds=1)
    assert "a.bias" in [t.name for t in found.tensors if t.problem]


def test_random_numbers_are_refused():
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        verify(Block(dropout=0.5), torch.randn(8, 32), seeds=1)


def test_gains_of_one_are_noted():
    model = Block()
    nn.init.ones_(model.norm.weight)
    assert any("norm.weight" in n for n in verify(model, torch.randn(48, 32), seeds=1).notes)


def test_other_batches_are_like_the_first():
    batch = {
        "input_ids": torch.tensor([[3, 5, 9]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.long),
        "position_ids": torch.arange(3),
        "x": 100 * torch.randn(50, 50),
        "flag": True,
    }
    assert varied(batch, 0) == batch
    other = varied(batch, 1)
    assert set(other["input_ids"].flatten().tolist()) <= {3, 5, 9}
    assert other["attention_mask"] is batch["attention_mask"]
    assert other["position_ids"] is batch["position_ids"]
    assert other["x"].std() == pytest.approx(100, rel=0.1)
    assert not torch.equal(other["x"], batch["x"])
    assert other["flag"] is True


def test_fresh_memory_is_poisoned_and_the_setting_comes_back():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.empty(8).isnan().all()
        assert torch.ones(8).new_empty(8).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_a_single_tensor_is_refused_as_a_list():
    with pytest.raises(Exception, match="an example batch is a dict or a tensor"):
        verify(Block(), [torch.randn(8, 32)])
