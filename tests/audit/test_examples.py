"""Every example runs, and does what it says."""

import importlib.util
import sys
from pathlib import Path

import pytest
from accelerate.utils import DynamoBackend

from codetta.audit.explain import explain
from codetta.audit.models import Request, find
from codetta.audit.verify import check

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_no_example_is_forgotten():
    assert {f.stem for f in EXAMPLES.glob("*.py")} == {
        "own_model",
        "train_llama",
        "train_with_trainer",
        "write_an_epilogue",
    }


def test_train_llama(monkeypatch, capsys):
    load("train_llama", monkeypatch).main()
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_train_with_trainer(monkeypatch, capsys):
    monkeypatch.setattr(DynamoBackend, "_missing_", DynamoBackend._missing_)  # it registers a name, for this test
    load("train_with_trainer", monkeypatch).main()
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert lines[-1] == "the checkpoint is the model: True"


def test_own_model(monkeypatch):
    load("own_model", monkeypatch)
    subject = find(Request("own_model:build", layers=1), weights=True)
    assert explain(subject.model, subject.batch).forward.gemms > 0
    found = check(subject, seeds=2)
    assert not [t.problem for t in found.tensors if t.problem]


def test_write_an_epilogue(monkeypatch, capsys):
    load("write_an_epilogue", monkeypatch).main()
    text = capsys.readouterr().out
    assert "as PyTorch computes it: True" in text
    assert text.count('@epilogue(gemm="tn"') == 2
