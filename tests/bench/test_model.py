"""Whole models: real processes on the CPU, and what each of them looks at before it takes a time."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from codetta.bench import model_cases, model_run
from codetta.bench.kernels import Settings
from codetta.bench.model import Chosen, model
from codetta.bench.model_cases import (
    CASES,
    CAUSAL,
    COMPILE,
    EAGER,
    LIGER,
    NEVER,
    case_named,
    contenders_named,
    flops_of,
    gemm_sizes,
)
from codetta.bench.model_rows import ModelReport, ModelRow
from codetta.bench.model_run import FORWARD_BACKWARD, FULL, Asked, Found, back_to_back, bare_gemms, serve
from codetta.bench.plots import draw
from codetta.bench.profile import SHARES
from codetta.bench.report import OURS
from codetta.bench.workers import Worker
from codetta.cli import app
from codetta.errors import SettingsError

TINY = CASES["tiny"]
ROUNDS = 2


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
        model(Chosen(("tiny",), steps=1), Settings(ROUNDS, variants=(OURS, f"{EAGER},{COMPILE}")), report)
    return Measured(report, folder)


@pytest.mark.slow
def test_all_are_measured(measured: Measured):
    want = [(v, case) for v in (COMPILE, OURS, EAGER) for case in (FULL, FORWARD_BACKWARD)]
    assert [(r.variant, r.case) for r in measured.rows] == want
    assert not [r.note for r in measured.rows if r.note]
    assert measured.report.ok
    bases = {r.case: r.samples for r in measured.rows if r.variant == COMPILE}
    for r in measured.rows:
        assert r.median
        assert r.rounds == ROUNDS
        assert r.base == COMPILE
        assert r.ratio == median(a / b for a, b in zip(r.samples, bases[r.case], strict=True))
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


def test_flash_attention_by_hand(monkeypatch: pytest.MonkeyPatch):
    """The kernels that ours takes, in a graph that is otherwise PyTorch's."""
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(n.target) for n in gm.graph.nodes if "codetta" in str(n.target))
        return gm.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net: net)
    net, batch = TINY.build("cpu")
    expected = net(**batch).loss
    torch._dynamo.reset()
    call = real(model_cases.CONTENDERS[model_cases.FLASH](net, {}), backend=backend)
    torch.testing.assert_close(call(**batch).loss, expected)
    assert found == ["codetta.attention"] * 2


def test_attention_as_pytorch_computes_it_is_a_contender(monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda net, **options: given.append(options))
    model_cases.CONTENDERS[model_cases.SDPA](torch.nn.Linear(1, 1), {"memory": "lean"})
    assert given == [{"backend": "codetta", "options": {"memory": "lean", "attention": "sdpa", "logits": "never"}}]


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


def served(*duties: dict[str, Any], contender: str = EAGER) -> list[Found]:
    """What a process answers, in this process."""
    said: list[str] = []
    serve(Asked("tiny", contender, "cpu"), map(json.dumps, duties), said.append)
    return [Found(**json.loads(line)) for line in said]


@pytest.mark.parametrize(
    "loss, text",
    [(lambda t: 1.01 * t, "the first loss"), (lambda t: 1.1 * t - 0.1 * t.detach(), "the gradients' norm")],
)
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, loss: Any, text: str):
    _, right = served({"do": "first", "loss": None, "norm": None})
    monkeypatch.setitem(model_cases.CONTENDERS, EAGER, changed(loss))
    turn = {"do": "turn", "steps": 1}
    found = served({"do": "first", "loss": right.loss, "norm": right.norm}, turn)[-1]
    assert text in found.note
    assert not found.samples


def test_an_answer_for_each_duty_and_what_went_wrong(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> Any:
        raise MemoryError("too large")

    monkeypatch.setattr(model_run, "profiled", fails)
    first, turn = {"do": "first", "loss": None, "norm": None}, {"do": "turn", "steps": 2}
    built, stepped, timed, failed = served(first, turn, {"do": "profile"}, turn)
    assert (built.loss, built.parameters) == (None, sum(p.numel() for p in TINY.build("cpu")[0].parameters()))
    assert stepped.loss
    assert {way: len(samples) for way, samples in timed.samples.items()} == {FULL: 2, FORWARD_BACKWARD: 2}
    assert failed == replace(timed, note="MemoryError: too large")


# --- the processes ----------------------------------------------------------------------------------------------------


def test_a_process_serves_until_it_is_ended(capfd: pytest.CaptureFixture[str]):
    with Worker(Asked("tiny", EAGER, "cpu")) as worker:
        found = worker.ask("first", 60.0, loss=None, norm=None)
        assert found.first_step
        assert worker.ask("turn", 60.0, steps=1).samples
    assert not found.note
    assert capfd.readouterr().out == ""


def test_a_process_that_takes_too_long_is_ended():
    with Worker(Asked("tiny", EAGER, "cpu")) as worker:
        assert worker.ask("first", 0.2, loss=None, norm=None).note == "ended after 0 s"


def test_a_process_that_dies_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    python = tmp_path / "python"
    lines = (json.dumps(asdict(Found())), json.dumps(asdict(Found(loss=2.5))), '{"loss": 3')
    python.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + "echo no GPU >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with Worker(Asked("tiny", EAGER, "cpu")) as worker:
        assert worker.ask("first", 60.0).loss == 2.5
        found = worker.ask("turn", 60.0)
    assert (found.loss, found.note) == (2.5, "the process ended with 3: no GPU")


@dataclass
class Played:
    """Processes that answer at once; ``asked`` has the duties of all, ``notes`` what goes wrong with first steps."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, asked: Asked, environment: Sequence[str] = ()) -> Any:
        return PlayedWorker(self, asked, environment, Found(flops=989e12))


@dataclass
class PlayedWorker:
    """One of them. Its first step takes 9 s where it begins with empty caches, then 2 s; a step takes as many seconds
    as its contender's name has letters."""

    team: Played
    asked: Asked
    environment: Sequence[str]
    found: Found
    ended: bool = False

    def ask(self, duty: str, seconds: float, **given: Any) -> Found:
        name = self.asked.contender
        self.team.asked.append((duty, name))
        if duty == "first":
            again = self.team.asked.count((duty, name)) > 1
            self.found.loss, self.found.first_step = 5.0, 2.0 if again else 9.0
            self.found.note = (self.team.notes.get(name) or [""]).pop(0) if self.team.notes.get(name) else ""
        if duty == "turn":
            self.found.samples.setdefault(FULL, []).extend([len(name) * 1e6] * given["steps"])
        return self.found

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    team = Played()
    monkeypatch.setattr("codetta.bench.model.Worker", team)
    return team


def test_all_compile_before_any_is_timed_and_turns_are_interleaved(played: Played):
    report = ModelReport("model")
    model(Chosen(("tiny",), steps=2), Settings(3, variants=(COMPILE, OURS)), report)
    duties = [duty for duty, _ in played.asked]
    assert duties == ["first"] * 3 + ["turn"] * 2 + ["profile"] * 2 + ["turn"] * 4
    assert played.asked[0] == ("first", EAGER)
    assert {name for duty, name in played.asked if duty != "first"} == {COMPILE, OURS}
    assert [(r.variant, r.rounds, r.ratio) for r in report.rows] == [(COMPILE, 6, 1.0), (OURS, 6, 7 / 13)]
    assert report.ok


def test_who_is_short_of_memory_gets_another_process_alone(played: Played):
    played.notes = {OURS: ["OutOfMemoryError: CUDA out of memory"], LIGER: ["another error"]}
    report = ModelReport("model")
    model(Chosen(("tiny",)), Settings(1, variants=(COMPILE, OURS, LIGER)), report)
    assert played.asked.count(("first", OURS)) == 2
    assert {r.variant: r.note for r in report.rows} == {COMPILE: "", OURS: "", LIGER: "another error"}


def test_without_the_models_own_loss_nothing_is_timed(played: Played):
    played.notes = {EAGER: ["too large"]}
    report = ModelReport("model")
    model(Chosen(("tiny",)), Settings(variants=(COMPILE, OURS)), report)
    assert played.asked == [("first", EAGER)]
    assert {r.note for r in report.rows} == {"the unmodified model gave no loss: too large"}
    assert not report.ok


def test_a_spent_budget_begins_nothing(played: Played):
    report = ModelReport("model", seconds=0.0)
    model(Chosen(("tiny", "qwen3-8b")), Settings(variants=(OURS,)), report)
    assert not played.asked
    assert report.skipped == ["tiny", "qwen3-8b"]


def test_calls_in_turn_are_taken_apart(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(model_run, "perf_counter", lambda: clock[0])

    def takes(seconds: float) -> Any:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    found = back_to_back([takes(1.0), takes(2.0)], 2, on_gpu=False)
    assert found == [[1e6, 1e6], [2e6, 2e6]]


# --- the command ------------------------------------------------------------------------------------------------------


def test_cold_first_steps_and_the_rate_of_the_gpu(played: Played):
    report = ModelReport("model", environment={"gpu": "NVIDIA H200"})
    chosen = Chosen(("tiny",), options={"memory": "fast"}, cold=True)
    model(chosen, Settings(1, variants=(f"{OURS},{NEVER}",)), report)
    row, other = report.rows
    assert isinstance(row, ModelRow)
    assert (row.variant, row.cold_first_step, row.first_step) == ("codetta, memory=fast", 9.0, 2.0)
    assert other.variant == "codetta without logits, memory=fast"
    assert row.tflops == pytest.approx(989 / 7)
    assert report.to_json()["rate"] == 989e12
    assert [name for duty, name in played.asked if duty == "first"] == [EAGER, OURS, OURS, NEVER, NEVER]


def test_names_that_there_are_not():
    with pytest.raises(SettingsError, match="no case '9b'"):
        case_named("9b")
    with pytest.raises(SettingsError, match="no contender 'jit'"):
        contenders_named(("jit",))
    for given in (["--case", "9b"], ["--memory", "some"]):
        assert CliRunner().invoke(app, ["bench", "model", *given]).exit_code == 2


def test_the_command(played: Played):
    given = ["bench", "model", "--case", "tiny", "--variants", OURS, "--memory", "lean", "--steps", "1", "--json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert [(r["variant"], r["case"]) for r in json.loads(done.stdout)["rows"]] == [("codetta, memory=lean", FULL)]
