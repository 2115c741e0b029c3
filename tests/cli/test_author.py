"""`codetta new` and `codetta check`, called as a user does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from authored import SWIGLU, written
from codetta.cli import app

RUN = CliRunner()


def call(*args: str, code: int = 0):
    result = RUN.invoke(app, list(args))
    assert result.exit_code == code, result.output + result.stderr
    return result


def test_a_new_file_passes_at_once_and_is_left_alone(tmp_path):
    file = tmp_path / "mine.py"
    assert call("new", "mine", "--folder", str(tmp_path)).stdout.strip() == str(file)
    text = file.read_text(encoding="utf-8")
    assert "def mine(acc: Tile" in text
    assert "def mine_reference(acc" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    out = call("check", "--quick", str(file)).stdout
    assert "mine (epilogue): right" in out
    assert "@epilogue" in out  # the derived backward
    file.write_text(text + "# mine\n", encoding="utf-8")
    assert "exists and is left alone" in call("new", "mine", "--folder", str(tmp_path), code=2).stderr
    assert file.read_text(encoding="utf-8").endswith("# mine\n")


@pytest.mark.parametrize("name", ["2fast", "for", "silu", "a-b"])
def test_a_name_that_is_none(tmp_path, name):
    assert "codetta:" in call("new", name, "--folder", str(tmp_path), code=2).stderr
    assert "no folder" in call("new", "mine", "--folder", str(tmp_path / "nowhere"), code=2).stderr


def test_new_as_json(tmp_path):
    found = json.loads(call("new", "mine", "--folder", str(tmp_path), "--json").stdout)
    assert Path(found["file"]) == tmp_path / "mine.py"


NAMES = {
    "name",
    "role",
    "line",
    "ok",
    "conditions",
    "sizes",
    "text",
    "comparisons",
    "backward",
    "kernels",
    "advice",
    "times",
    "skipped",
}


def test_json_has_stable_names(tmp_path):
    found = json.loads(call("check", "--quick", "--json", written(tmp_path, SWIGLU)).stdout)
    assert found.keys() == {"codetta_check", "ok", "file", "error", "programs"}
    assert (found["codetta_check"], found["ok"], found["error"]) == (1, True, None)
    (program,) = found["programs"]
    assert program.keys() == NAMES
    assert program["conditions"] == {"right": True, "one_kernel": None, "no_spills": None}
    wanted = {"name", "kind", "ok", "max_error", "limit", "at", "place", "expected", "got", "problem"}
    assert all(c.keys() == wanted for c in program["comparisons"])
    assert {c["kind"] for c in program["comparisons"]} == {"value", "stored", "forward", "gradient"}
    assert {s["what"] for s in program["skipped"]} == {"kernels", "running and timing on a GPU"}
    assert all(b.keys() == {"name", "role", "text"} for b in program["backward"])


def test_what_is_wrong_exits_with_1_and_says_where(tmp_path):
    place = written(tmp_path, SWIGLU.replace("y=silu(gate) * up", "y=silu(gate) + up"))
    out = call("check", "--quick", place, code=1).stdout
    assert "swiglu (epilogue): wrong" in out
    assert "swiglu: wrong, kernels not looked at" in out
    assert "values, float64: y: largest error" in out
    assert "expected" in out
    found = json.loads(call("check", "--quick", "--json", f"{place}::swiglu", code=1).stdout)
    assert found["ok"] is False
    bad = {c["name"] for c in found["programs"][0]["comparisons"] if c["kind"] == "value" and not c["ok"]}
    assert bad == {"y"}


def test_what_cannot_be_checked_exits_with_2(tmp_path):
    place = written(tmp_path, "@epilogue\ndef f(acc: Tile):\n    return acc * sum_row(acc)\n")
    result = call("check", place, code=2)
    assert "crosses tiles" in result.stderr
    assert "write: return dict(..., row=sum_row(acc))" in result.stderr
    found = json.loads(call("check", "--json", place, code=2).stdout)
    assert found.keys() == {"codetta_check", "ok", "file", "error", "programs"}
    assert found["programs"] == []
    assert found["error"].keys() == {"kind", "message", "where", "hint", "write"}
    assert "no file" in call("check", str(tmp_path / "no.py"), code=2).stderr
