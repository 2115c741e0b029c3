"""The commands, called as a user does."""

import json

import pytest
from typer.testing import CliRunner

import codetta
from codetta.audit import verify as verification
from codetta.cli import COMMANDS, app
from codetta.cli import explain as explain_command

RUN = CliRunner()


def call(*args: str, code: int = 0):
    result = RUN.invoke(app, list(args))
    assert result.exit_code == code, result.output + result.stderr
    return result


def test_help_names_every_command():
    text = call("--help").output
    assert all(name in text for name in COMMANDS)


def test_version():
    assert call("--version").output == f"codetta {codetta.__version__}\n"


def test_every_command_has_help_and_json():
    for name in COMMANDS:
        assert "--json" in call(name, "--help").output


def test_an_unknown_command():
    assert "No such command" in call("compose", code=2).stderr


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_explain_counts_exactly(layers):
    found = json.loads(call("explain", "llama-tiny", "--layers", str(layers), "--json").stdout)
    forward, backward = found["forward"], found["backward"]
    assert forward["gemms"] == 4 * layers + 1
    assert forward["leftovers"] == 1
    assert forward["finalizes"] == 2 * layers + 1  # with the loss's
    assert backward["gemms"] == 8 * layers + 2
    assert backward["data_gradient_epilogues"] == 3 * layers + 1
    assert backward["leftovers"] <= layers + 1
    assert backward["finalizes"] <= 3 * layers + 1
    assert forward["opaque"] > 0
    assert len(forward["leftover_reasons"]) == 1
    for half in (forward, backward):
        assert 0 < half["bytes"] < half["bytes_boundary_fusion"] < half["bytes_eager"]


def test_explain_prints_the_table_of_families(monkeypatch):
    monkeypatch.setattr(explain_command, "models_page", lambda: "# Model families\n")
    assert call("explain", "families").stdout == "# Model families\n"


def test_explain_a_large_model_without_memory():
    found = json.loads(
        call("explain", "llama3-70b", "--layers", "2", "--tokens", "8192", "--batch", "1", "--json").stdout
    )
    assert found["forward"]["gemms"] == 9
    assert {s["tokens"] for s in found["segments"]} == {8192}


def test_explain_in_words():
    text = call("explain", "llama-tiny", "--layers", "1").stdout
    for part in ("GEMMs", "leftovers", "opaque calls", "@epilogue", "B200", "attention stays with PyTorch"):
        assert part in text


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_verify_passes(dtype):
    found = json.loads(call("verify", "llama-tiny", "--dtype", dtype, "--json").stdout)
    assert found["ok"] is True
    assert found["geometric_mean"] <= found["geometric_mean_allowed"]
    assert found["geometric_mean"] < {"bf16": 0.85, "f32": 1.01}[dtype]
    assert len(found["tensors"][0]["seeds"]) == 5


def test_verify_that_fails_exits_with_1(monkeypatch):
    monkeypatch.setattr(verification, "relative_error", lambda got, reference: float(got.dim() == 1))
    result = call("verify", "llama-tiny", "--layers", "1", "--tokens", "16", "--batch", "1", "--seeds", "1")
    assert "passes" in result.stdout  # both wrong alike
    errors = iter([2.0, 1.0] * 1000)
    monkeypatch.setattr(verification, "relative_error", lambda got, reference: next(errors))
    result = call("verify", "llama-tiny", "--layers", "1", "--tokens", "16", "--batch", "1", "--seeds", "1", code=1)
    assert "misses the bar" in result.stdout


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_verify_per_layer(monkeypatch):
    """Each layer compiled alone, and what it gives; exit code 1 where something is off."""
    tiny = ("verify", "llama-tiny", "--layers", "1", "--tokens", "16", "--batch", "1", "--seeds", "1", "--per-block")
    errors = iter([2.0, 1.0] * 1000)
    monkeypatch.setattr(verification, "relative_error", lambda got, reference: next(errors))
    found = json.loads(call(*tiny, "--per-layer", "--json", code=1).stdout)
    assert [t["layer"] for t in found["tensors"][:2]] == ["model.layers.0", "the model"]
    assert found["first"]["name"] == "model.layers.0"
    assert found["first"]["problem"].startswith("relative error 2")


def test_doctor():
    found = json.loads(call("doctor", "--json").stdout)
    assert found["codetta"] == codetta.__version__
    assert any(t["runs"] for t in found["targets"])
    assert "reference backend" in call("doctor").stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (("explain", "no-such-model"), "codetta: no model 'no-such-model'"),
        (("explain", "llama-tiny", "--dtype", "int3"), "codetta: no dtype 'int3'"),
        (("explain", "llama-tiny", "--memory", "huge"), "codetta: option memory='huge'"),
        (("verify", "llama-tiny", "--tokens", "3", "--batch", "2"), "codetta: 3 tokens are not 2 sequences"),
    ],
)
def test_an_error_is_a_message_and_exit_code_2(args, message):
    result = call(*args, code=2)
    assert result.stderr.startswith(message)
    assert "hint:" in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
