"""Models by name: presets, configuration folders, callables, and what is refused."""

import builtins
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from codetta.audit.models import PRESETS, Request, as_batch, find, perturb_gains
from codetta.errors import SettingsError, UnsupportedError

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    "name, billions", [("llama-tiny", 0.0008), ("llama3-1b", 1.236), ("llama3-8b", 8.030), ("llama3-70b", 70.554)]
)
def test_presets_have_their_sizes_and_take_no_memory(name, billions):
    subject = find(Request(name), weights=False)
    parameters = list(subject.model.parameters())
    assert all(p.is_meta for p in parameters)
    assert subject.batch["input_ids"].is_meta
    assert sum(p.numel() for p in parameters) / 1e9 == pytest.approx(billions, abs=0.0005)
    assert subject.model.training


def test_options():
    subject = find(Request("llama-tiny", layers=2, tokens=48, batch=3, dtype="bf16"), weights=True)
    assert subject.batch["input_ids"].shape == (3, 16)
    assert len(subject.model.model.layers) == 2
    assert {p.dtype for p in subject.model.parameters()} == {torch.bfloat16}
    assert subject.batch["labels"].max() < PRESETS["llama-tiny"].vocabulary // 2


def test_renew_gives_other_weights_and_tokens_and_the_same_for_the_same_seed():
    subject = find(Request("llama-tiny", layers=1), weights=True)
    first = subject.renew(3)["input_ids"]
    weights = subject.model.lm_head.weight.clone()
    assert not torch.equal(subject.renew(4)["input_ids"], first)
    assert not torch.equal(subject.model.lm_head.weight, weights)
    assert torch.equal(subject.renew(3)["input_ids"], first)
    assert torch.equal(subject.model.lm_head.weight, weights)
    assert not bool((subject.model.model.norm.weight == 1).any())


def test_perturbed_are_fresh_gains_and_biases_alone():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    before = [p.clone() for p in model[1].parameters()]
    perturb_gains(model, 0)
    assert model[0].weight.std() > 0.1
    assert model[0].bias.std() > 0.01
    assert all(torch.equal(a, b) for a, b in zip(before, model[1].parameters(), strict=True))


def test_a_configuration_folder(tmp_path):
    LlamaConfig(**TINY, vocab_size=64, num_hidden_layers=3).save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        subject = find(Request(str(name), layers=2, tokens=8), weights=True)
        assert len(subject.model.model.layers) == 2
        assert subject.model.config.vocab_size == 64
        assert subject.batch["input_ids"].shape == (1, 8)
        assert subject.model.config.use_cache is False
        assert subject.notes


def test_a_callable_gets_the_options_that_it_takes(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build(layers=1, tokens=4):\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))\n"
        "    return model, torch.ones(tokens, 4)\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    subject = find(Request("mine:build", layers=3, dtype="bf16"), weights=True)
    assert len(subject.model) == 3
    assert subject.batch["input"].shape == (4, 4)
    assert subject.model[0].weight.dtype is subject.batch["input"].dtype is torch.bfloat16
    with pytest.raises(SettingsError, match="takes no --batch\n  hint: it takes layers, tokens"):
        find(Request("mine:build", batch=2), weights=True)
    with pytest.raises(SettingsError, match="returned int"):
        find(Request("mine:wrong"), weights=True)
    with pytest.raises(SettingsError, match="no model 'mine:absent'"):
        find(Request("mine:absent"), weights=True)


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request("gpt-5"), "no model 'gpt-5'"),
        (Request("no/such"), "no model 'no/such': there is no such folder"),
        (Request("llama-tiny", dtype="int8"), "no dtype 'int8'"),
        (Request("llama-tiny", tokens=10, batch=4), "10 tokens are not 4 sequences"),
    ],
)
def test_what_means_nothing_is_refused(request_, message):
    with pytest.raises(SettingsError, match=message):
        find(request_, weights=False)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"no config\.json"):
        find(Request(str(tmp_path)), weights=False)


def test_without_transformers_the_way_out_is_told(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedError, match=r"pip install 'codetta\[hf\]'"):
        find(Request("llama-tiny"), weights=False)


def test_a_batch_is_a_dict_or_a_tensor():
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    assert as_batch(model, x) == {"input": x}
    assert as_batch(model, {"input": x}) == {"input": x}
    with pytest.raises(SettingsError, match="not a list"):
        as_batch(model, [x])
