"""Whole models: real processes on the CPU, and what each of them looks at before it takes a time."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from codetta.bench import model_cases, model_run
from codetta.bench.kernels import Settings
from codetta.bench.model import Chosen, ModelReport, ModelRow, ask, caches_in, model
from codetta.bench.model_cases import (
    CASES,
    CAUSAL,
    COMPILE,
    EAGER,
    LIGER,
    case_named,
    contenders_named,
    flops_of,
    gemm_sizes,
)
from codetta.bench.model_run import FORWARD_BACKWARD, FULL, Asked, Found, back_to_back, bare_gemms, run
from codetta.bench.plots import draw
from codetta.bench.profile import SHARES
from codetta.bench.report import OURS
from codetta.cli import app
from codetta.errors import SettingsError, VerifyError

TINY = CASES["tiny"]
STEPS = 2


@dataclass(frozen=True)
class Measured:
    """A whole run."""

    report: ModelReport
    folder: Path

    @property
    def rows(self) -> list[ModelRow]:
        return [r for r in self.report.rows if isinstance(r, ModelRow)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The tiny case, three contenders, a process each."""
    folder = tmp_path_factory.mktemp("model")
    report = ModelReport("model", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        model(Chosen(("tiny",), STEPS), Settings(variants=(OURS, f"{EAGER},{COMPILE}")), report)
    return Measured(report, folder)


@pytest.mark.slow
def test_all_are_measured(measured: Measured):
    want = [(v, case) for v in (COMPILE, OURS, EAGER) for case in (FULL, FORWARD_BACKWARD)]
    assert [(r.variant, r.case) for r in measured.rows] == want
    assert not [r.note for r in measured.rows if r.note]
    assert measured.report.ok
    bases = {r.case: r.median for r in measured.rows if r.variant == COMPILE}
    for r in measured.rows:
        assert r.median
        assert r.rounds == STEPS
        assert r.base == COMPILE
        assert r.ratio == r.median / bases[r.case]
        assert r.tokens_per_second == pytest.approx(128 / (r.median / 1e6))


@pytest.mark.slow
def test_their_losses_and_gradients_are_those_of_float64(measured: Measured):
    net, batch = TINY.build("cpu")
    loss = net.double()(**batch).loss
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm().item()
    for r in measured.rows:
        if r.found:
            assert r.found["loss"] == pytest.approx(loss.item(), rel=1e-5)
            assert r.found["norm"] == pytest.approx(norm, rel=1e-4)
            assert r.found["first_step"] > 0


@pytest.mark.slow
def test_where_the_time_goes(measured: Measured):
    """The profiler finds the optimizer's one call and at least each GEMM of forward and backward."""
    for r in (r for r in measured.rows if r.case == FULL):
        assert list(r.profile) == list(SHARES)
        assert sum(map(r.part, SHARES)) == pytest.approx(1.0)
        assert r.found["kernels"]["optimizer"] == 1.0
        assert r.found["kernels"]["attention"] == 2 * 2
        assert r.found["kernels"]["GEMM, library"] >= 3 * (2 * 4 + 1)


@pytest.mark.slow
def test_it_is_kept_drawn_and_shown(measured: Measured):
    found = json.loads((measured.folder / "model.json").read_text())
    assert [r["variant"] for r in found["rows"]] == [r.variant for r in measured.rows]
    (file,) = draw(found, measured.folder)
    assert file.name == "model-tiny.png"
    assert file.read_bytes()[:4] == b"\x89PNG"
    console = Console(width=150, file=io.StringIO())
    with console.capture() as captured:
        console.print(measured.report)
    text = captured.get()
    assert "Profiled steps" in text
    assert "tokens/s" in text


# --- what is known of a model -----------------------------------------------------------------------------------------


def test_flops_are_those_that_pytorch_counts():
    net, batch = TINY.build("cpu")
    with FlopCounterMode(display=False) as counter:
        net(**batch).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    gemms = sum(n for op, n in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    config: Any = net.config
    causal = 6 * 128 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 64
    assert flops_of(net, TINY) == gemms + causal


def test_the_bare_gemms_are_those_of_a_step():
    net, _ = TINY.build("cpu")
    with FlopCounterMode(display=False) as counter:
        bare_gemms(net, TINY, lambda: None, rounds=2)
    assert counter.get_total_flops() == 3 * 6 * 128 * sum(n * k for n, k in gemm_sizes(net))


@pytest.mark.parametrize(
    "name, gemms, parameters",
    [("llama-3.2-1b", 16 * 4 + 1, 1.236e9), ("llama3-8b", 8 * 4 + 1, 2.795e9), ("qwen3-8b", 8 * 4 + 1, 2.788e9)],
)
def test_cases_have_the_published_sizes(name: str, gemms: int, parameters: float):
    case = case_named(name)
    with torch.device("meta"):
        net = model_cases.random_model(case.config(), torch.bfloat16, seed=0, device="meta")
    assert len(list(gemm_sizes(net))) == gemms
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(parameters, rel=2e-3)
    assert case.tokens == 16_384


def test_attention_made_causal_by_hand_has_no_mask(monkeypatch: pytest.MonkeyPatch):
    masks: dict[str, list[Any]] = {}

    def traced(name: str, net: Any, batch: dict[str, Any]) -> torch.Tensor:
        def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
            calls = [n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target)]
            masks[name] = [(n.kwargs["attn_mask"] is None, n.kwargs["is_causal"]) for n in calls]
            return gm.forward

        torch._dynamo.reset()
        return real(net, backend=backend)(**batch).loss

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net: net)
    net, batch = TINY.build("cpu")
    plain = traced("plain", net, batch)
    causal = traced(CAUSAL, model_cases.CONTENDERS[CAUSAL](net, {}), batch)
    assert masks == {"plain": [(False, False)] * 2, CAUSAL: [(True, True)] * 2}
    torch.testing.assert_close(plain, causal)


def test_liger_patches_the_instance_with_its_loss(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []
    stub = SimpleNamespace(_apply_liger_kernel_to_instance=lambda **given: calls.append(given))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=stub))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stub)
    net = torch.nn.Linear(1, 1)
    assert model_cases.CONTENDERS[LIGER](net, {}) is net
    assert calls == [{"model": net, "fused_linear_cross_entropy": True}]


# --- what is off gets no time -----------------------------------------------------------------------------------------


def changed(loss: Any) -> Any:
    return lambda net, _: lambda **batch: SimpleNamespace(loss=loss(net(**batch).loss))


@pytest.mark.parametrize(
    "loss, text",
    [(lambda t: 1.01 * t, "the first loss"), (lambda t: 1.1 * t - 0.1 * t.detach(), "the gradients' norm")],
)
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, loss: Any, text: str):
    monkeypatch.setitem(model_cases.CONTENDERS, EAGER, changed(loss))
    found, parts = Found(), []
    with pytest.raises(VerifyError, match=text):
        parts.extend(run(Asked("tiny", EAGER, 1, "cpu"), found))
    assert not found.samples
    assert found.eager_loss


def test_another_model_is_told(monkeypatch: pytest.MonkeyPatch):
    losses = iter((5.0, 5.1))
    answer = Found(samples={FULL: [1.0]}, flops=1.0)
    monkeypatch.setattr("codetta.bench.model.ask", lambda *_: replace(answer, loss=(x := next(losses)), eager_loss=x))
    report = ModelReport("model")
    model(Chosen(("tiny",)), Settings(variants=(COMPILE, OURS)), report)
    assert [bool(r.note) for r in report.rows] == [False, True]
    assert not report.ok


# --- the process ------------------------------------------------------------------------------------------------------


def test_a_line_a_part_and_what_went_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fails(net: Any, options: Any) -> Any:
        raise MemoryError("too large")

    monkeypatch.setitem(model_cases.CONTENDERS, EAGER, fails)
    asked = {"case": "tiny", "contender": EAGER, "steps": 1, "device": "cpu"}
    assert model_run.main(json.dumps(asked)) == 1
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["eager_loss"] == last["eager_loss"]
    assert last["note"] == "MemoryError: too large"


def test_the_first_step_alone_with_empty_caches(tmp_path: Path):
    found = ask(Asked("tiny", EAGER, 1, "cpu", first=True), caches_in(str(tmp_path)), 60.0)
    assert not found.note
    assert found.first_step
    assert not found.samples


def test_a_process_that_takes_too_long_is_ended():
    assert ask(Asked("tiny", EAGER, 1, "cpu"), (), 0.2).note == "ended after 0 s"


def test_a_process_that_dies_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    python = tmp_path / "python"
    lines = (json.dumps(asdict(Found(loss=2.5))), '{"loss": 3')
    python.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + "echo no GPU >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    found = ask(Asked("tiny", EAGER, 1, "cpu"), (), 60.0)
    assert (found.loss, found.note) == (2.5, "the process ended with 3: no GPU")


def test_calls_in_turn_are_taken_apart(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(model_run, "perf_counter", lambda: clock[0])

    def takes(seconds: float) -> Any:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    found = back_to_back([takes(1.0), takes(2.0)], 2, on_gpu=False)
    assert found == [[1e6, 1e6], [2e6, 2e6]]


# --- the command ------------------------------------------------------------------------------------------------------


def test_cold_first_steps_and_the_rate_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[Asked, bool]] = []

    def answer(a: Asked, environment: tuple[str, ...], _: float) -> Found:
        asked.append((a, bool(environment)))
        return Found(first_step=9.0) if a.first else Found(first_step=2.0, samples={FULL: [2e6]}, flops=989e12)

    monkeypatch.setattr("codetta.bench.model.ask", answer)
    report = ModelReport("model", environment={"gpu": "NVIDIA H200"})
    model(Chosen(("tiny",), options={"logits": "never"}, cold=True), Settings(variants=(OURS,)), report)
    (row,) = report.rows
    assert isinstance(row, ModelRow)
    assert (row.variant, row.cold_first_step, row.first_step) == ("codetta, logits=never", 9.0, 2.0)
    assert row.tflops == pytest.approx(989 / 2)
    assert report.to_json()["rate"] == 989e12
    assert [(a.first, c) for a, c in asked] == [(True, True), (False, True)]
    assert asked[0][0].options == {"logits": "never"}


def test_names_that_there_are_not():
    with pytest.raises(SettingsError, match="no case '9b'"):
        case_named("9b")
    with pytest.raises(SettingsError, match="no contender 'jit'"):
        contenders_named(("jit",))
    for given in (["--case", "9b"], ["--logits", "some"]):
        assert CliRunner().invoke(app, ["bench", "model", *given]).exit_code == 2


def test_the_command(monkeypatch: pytest.MonkeyPatch):
    answer = Found(samples={FULL: [2.0], FORWARD_BACKWARD: [1.0]}, loss=1.0, eager_loss=1.0)
    monkeypatch.setattr("codetta.bench.model.ask", lambda *_: answer)
    given = ["bench", "model", "--case", "tiny", "--variants", EAGER, "--steps", "1", "--json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert [r["case"] for r in json.loads(done.stdout)["rows"]] == [FULL, FORWARD_BACKWARD]
