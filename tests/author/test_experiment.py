"""The experiment's tasks are whole, their own programs solve them, and the judge sees what is wrong."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from codetta.author.bind import compiled_form
from codetta.author.check import check
from codetta.backends.hopper.choose import why_split

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("authoring", ROOT / "benchmarks" / "authoring.py")
authoring = importlib.util.module_from_spec(spec)
sys.modules["authoring"] = authoring
spec.loader.exec_module(authoring)
TASKS = authoring.tasks()


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    authoring.write_own(folder)
    return folder


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.key)
def test_a_task_asks_for_what_its_own_program_does(task, own):
    text = task.file.read_text(encoding="utf-8")
    assert "codetta" not in text
    assert "epilogue" not in text
    (authored,) = authoring.load(f"{own / task.key / '1.py'}::{task.name}")
    assert authored.program == task.own
    assert authored.sizes == {"M": 16_384}
    assert not authoring.changed_task(task, own / task.key / "1.py")


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.key)
def test_the_answers_that_are_told_of_are_right(task):
    """Those of docs/authoring/experiment.md: the last file of each task, with the task's own reference."""
    last = max((ROOT / "benchmarks" / "authoring" / "answers" / task.key).glob("*.py"), key=lambda f: int(f.stem))
    assert not authoring.changed_task(task, last)
    (found,) = check(f"{last}::{task.name}", quick=True).programs
    assert not [f"{c.kind} {c}" for c in found.comparisons if not c.ok]
    program = compiled_form(authoring.load(str(last))[0].program, found.sizes)
    assert program.params[0].type == task.own.params[0].type
    assert why_split(program) is None


def test_the_own_program_is_right_and_a_changed_reference_is_seen(own, tmp_path):
    task = next(t for t in TASKS if t.name == "rms_scale")
    assert authoring.judged(task, own / task.key / "1.py", quick=True)["ok"]
    text = (own / task.key / "1.py").read_text(encoding="utf-8")
    cheated = tmp_path / "1.py"
    cheated.write_text(text.replace("acc * rstd[:, None]", "acc + rstd[:, None]"), encoding="utf-8")
    assert authoring.judged(task, cheated, quick=True)["kind"] == "TaskChanged"
    cheated.write_text("def", encoding="utf-8")
    assert "no Python" in authoring.judged(task, cheated, quick=True)["message"]


def test_wrong_numbers_and_wrong_sizes():
    task = next(t for t in TASKS if t.name == "rms_scale")
    compared = {"ok": False, "kind": "value", "name": "y"}
    program = {"ok": False, "comparisons": [compared], "kernels": [], "text": "acc: Tile[4096, f32]"}
    assert authoring._of_program(task, program)["kind"] == "wrong numbers"
    other = program | {"ok": True, "comparisons": [], "text": "acc: Tile[64, f32]"}
    assert authoring._of_program(task, other)["kind"] == "wrong size"
    assert authoring._of_program(task, other | {"text": "acc: Tile[4096, f32]"})["ok"]


def test_the_tables(tmp_path):
    kernel = {"kind": "kernel", "spill_stores": 0}
    found = {
        "a": {
            "attempts": [{"ok": False, "kind": "TypeMismatch"}, {"ok": True, "kind": "", "kernels": [kernel]}],
            "times": {"answer_us": 812.4, "answer_over_own": 1.01, "answer_over_bare": 0.98},
        },
        "b": {"attempts": [{"ok": True, "kind": "", "kernels": [{"kind": "split", "reason": "why"}]}]},
        "c": {"attempts": []},
    }
    authoring.write(tmp_path, found)
    assert json.loads((tmp_path / "authoring.json").read_text(encoding="utf-8")) == found
    lines = (tmp_path / "authoring.md").read_text(encoding="utf-8").splitlines()
    assert "| a | 2 | yes | yes | 0 | 812 | 1.010 | 0.980 |" in lines
    assert "| b | 1 | yes | why |  |  |  |  |" in lines
    assert "| c | 0 |  |  |  |  |  |  |" in lines
    assert "Right at the first attempt: 1 of 2; right at last: 2 of 2." in lines
    assert "| TypeMismatch | 1 |" in lines
