"""transformers' Trainer: accumulation, clipping, fused AdamW, evaluation, checkpoints, on a compiled model."""

import copy
import pickle
import sys

import pytest
import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import codetta
from codetta.errors import UnsupportedError
from features.training import assert_same_step, compile_, gemms_compiled, step, tokens
from ways import llama

ROWS = 24


def trainer(model, folder, **changes):
    """Four steps of two micro-batches, evaluated and saved in the middle."""
    data = [{"input_ids": row, "labels": row} for row in tokens(0, (ROWS, 12))]
    usual = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(output_dir=str(folder), **{**usual, **changes})
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:5])


def logged(run, name):
    return torch.tensor([entry[name] for entry in run.state.log_history if name in entry])


def assert_same_log(ours, theirs, rtol=1e-4):
    """Losses, norms of gradients and evaluations of two runs; a loss is logged per step, an evaluation every two."""
    for name, count in (("loss", 4), ("grad_norm", 4), ("eval_loss", 2)):
        assert len(logged(theirs, name)) == count
        torch.testing.assert_close(logged(ours, name), logged(theirs, name), rtol=rtol, atol=0.0)


@pytest.mark.parametrize("regime", ["whole", pytest.param("blocks", marks=pytest.mark.slow)])
def test_compiled_in_place(regime, tmp_path):
    """``model.compile(backend="codetta")`` before the Trainer: its log is eager's; its checkpoint is read by a model
    that was never compiled, and training is resumed from the one before as if it had not stopped."""
    eager = trainer(llama(), tmp_path / "eager")
    eager.train()
    model = llama()
    ours = trainer(compile_(model, regime), tmp_path / "ours")
    with gemms_compiled():
        ours.train()
    assert_same_log(ours, eager)
    read = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4").train()
    assert_same_step(step(model), step(read))
    again = trainer(compile_(llama(), regime), tmp_path / "ours")
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_same_log(again, eager)


@pytest.mark.slow
def test_autocast(tmp_path):
    """``bf16=True``: the losses are as near to eager's as bfloat16 can tell."""
    eager, ours = (trainer(m, tmp_path, bf16=True, save_strategy="no") for m in (llama(), compile_(llama())))
    eager.train()
    with gemms_compiled():
        ours.train()
    assert_same_log(ours, eager, rtol=2**-7)


@pytest.fixture
def registered(monkeypatch):
    """The name is known to accelerate, and afterwards is not."""
    monkeypatch.setattr(DynamoBackend, "_missing_", DynamoBackend._missing_)
    codetta.register_with_accelerate()


@pytest.mark.usefixtures("registered")
def test_backend_by_name(tmp_path):
    """``TrainingArguments(torch_compile_backend="codetta")``: as eager, checkpoints with the usual names included."""
    eager = trainer(llama(), tmp_path / "eager")
    eager.train()
    torch._dynamo.reset()
    model = llama()
    ours = trainer(model, tmp_path / "ours", torch_compile_backend="codetta")
    with gemms_compiled():
        ours.train()
    assert_same_log(ours, eager)
    read = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4").train()
    assert_same_step(step(model), step(read))


@pytest.mark.usefixtures("registered")
def test_the_name_is_as_good_as_a_member():
    """It is copied and pickled like one, twice registered it is the same, and what is no name is still an error."""
    ours = DynamoBackend("CODETTA")
    codetta.register_with_accelerate()
    plugin = TorchDynamoPlugin(backend="codetta")
    assert plugin.backend is ours is copy.deepcopy(ours) is pickle.loads(pickle.dumps(ours))
    assert plugin.to_dict()["backend"] == plugin.to_kwargs()["backend"] == "codetta"
    assert ours not in (DynamoBackend.NO, DynamoBackend.INDUCTOR)
    assert "CODETTA" not in DynamoBackend.list()
    with pytest.raises(ValueError, match="CODETA"):
        TorchDynamoPlugin(backend="codeta")


def test_without_registration_the_name_is_refused():
    """If accelerate takes it one day, nothing has to be registered any more."""
    with pytest.raises(ValueError, match="CODETTA"):
        TorchDynamoPlugin(backend="codetta")


def test_without_accelerate(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    with pytest.raises(UnsupportedError, match="accelerate is not installed"):
        codetta.register_with_accelerate()
