"""The demo, shortened: the runs agree, the picture is drawn, and a disagreement is not hidden."""

import json

import pytest

from codetta.audit import demo as module
from codetta.audit.demo import Check, demo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return demo(tmp_path_factory.mktemp("out") / "deep" / "demo.png", steps=4)


def test_runs_agree(short):
    assert short.ok, short.to_json()["checks"]
    eager, ours, other = short.runs
    assert len(eager.losses) == 4
    assert eager.losses[-1] < eager.losses[0]
    assert ours.losses != other.losses


def test_counts_are_those_of_the_compiled_model(short):
    layers = 4
    assert short.explanation.forward.gemms == 4 * layers + 1
    assert short.explanation.backward.gemms == 8 * layers + 2
    assert short.segment.forward["codetta"] < short.segment.forward["ideal fusion between GEMMs"]


def test_the_picture_is_small_enough_to_keep(short):
    data = short.image.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 150_000


def test_it_is_json_and_text(short):
    from rich.console import Console

    found = json.loads(json.dumps(short.to_json()))
    assert found["ok"] is True
    assert len(found["runs"]) == 3
    console = Console(width=140)
    with console.capture() as text:
        console.print(short)
    assert "codetta / eager" in text.get()
    assert "held-out text" in text.get()


@pytest.mark.parametrize("found, ok", [(1e-6, True), (2e-5, False), (float("nan"), False)])
def test_a_check_that_fails(found, ok):
    assert Check("losses", found, 1e-5).ok is ok


def test_a_wrong_run_is_not_ok(short):
    eager, ours, other = short.runs
    wrong = module.Run(ours.name, ours.call, ours.model, 0, ours.optimizer, [x * 1.001 for x in ours.losses])
    wrong.held_out = ours.held_out
    checks = module._checks((eager, wrong, other), (eager, eager))
    assert [c.ok for c in checks] == [False, True, True]
