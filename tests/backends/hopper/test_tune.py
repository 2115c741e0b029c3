"""The search for the fastest configuration, with times that are known: no GPU, no compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from codetta.audit.tuning import Tuning, plans_of, preset_of
from codetta.author.file import load
from codetta.author.kernels import gemms_of
from codetta.backends.hopper import choose as choosing
from codetta.backends.hopper import tune as tuning
from codetta.backends.hopper.config import BUCKETS, Config, fits
from codetta.backends.hopper.emulate import emulate
from codetta.backends.hopper.space import space
from codetta.backends.hopper.tune import Case, Made, Pick, cases_of, cases_of_programs, tune
from codetta.cli import app
from codetta.cli import tune as tune_command
from codetta.core.types import bf16
from codetta.errors import SettingsError
from codetta.lang.source import parse_program
from codetta.partition.plan import Plan, Step


def program(body: str, parameters: str = "", n: int = 4096, k: int = 4096, form: str = "nt", rows: str = ""):
    size = f"{rows}{n}, f32" if not rows else f"{rows}, {n}, f32"
    inner = '"M"' if form == "tn" else k
    return parse_program(
        f'@epilogue(gemm="{form}", k={inner}, dtype=bf16)\n'
        f"def p(acc: Tile[{size}]{parameters}):\n    return dict({body})\n"
    )


RESIDUAL = program("y=to(acc + x, bf16), s=sum_row((acc + x) * (acc + x))", ", x: Tile[4096, bf16]")
NORM_BACKWARD = program(
    "d=to(acc * r * g + c, bf16), y=to(x * r, bf16), s=sum_col(acc * x)",
    ", c: Tile[4096, bf16], x: Tile[4096, bf16], g: RowVec[4096, bf16], r: ColVec[f32]",
)
BARE = program("y=to(acc, bf16)", form="nn")


def case(p, tokens: int = 16_384, default: Config | None = None) -> Case:
    return Case(p, choosing.lowered_of(p), tokens, default)


@dataclass
class Bench:
    """Kernels with a given time each; what spills, has few stages, is wrong or does not compile is said too."""

    times: Callable[[Case, Config | None], float]
    spills: Callable[[Config], int] = lambda c: 0
    stages: Callable[[Config], int | None] = lambda c: None
    wrong: Callable[[Config], bool] = lambda c: False
    compiles: Callable[[Config], bool] = lambda c: True
    alone: Callable[[Case, Config | None], float] | None = None
    heats: list[list[Pick]] = field(default_factory=list)
    compiled: list[Config] = field(default_factory=list)
    now: float = 0.0

    def compile(self, picks, seconds):
        self.now += 10
        self.compiled += [c for _, c in picks]
        return {p: Made(self.spills(p[1]), self.stages(p[1])) for p in picks if self.compiles(p[1])}

    def right(self, pick):
        return not self.wrong(pick[1])

    def time(self, picks, rounds, seconds):
        self.now += rounds
        self.heats.append(list(picks))
        return {(c, config): self.times(c, config) for c, config in picks}

    def time_alone(self, picks, rounds, seconds):
        found = self.time(picks, rounds, seconds)
        return {pick: self.alone(*pick) for pick in found} if self.alone else found


def flat(best: Config, us: float = 800.0) -> Callable[[Case, Config | None], float]:
    """The library takes 1000 us, the best configuration less, any other 900 and a bit."""
    return lambda c, config: 1000.0 if config is None else us if config == best else 900.0 + hash(str(config)) % 50


def run(bench: Bench, *cases: Case, budget: float = 1000.0):
    return tune(cases, bench, budget=budget, clock=lambda: bench.now)


def test_the_fastest_wins_and_few_are_timed_long():
    best = Config(128, 160, pingpong=True, narrow=True)
    bench = Bench(flat(best))
    (found,) = run(bench, case(RESIDUAL, default=Config(128, 256, narrow=True)))
    assert (found.winner, found.us, found.library_us) == (best, 800.0, 1000.0)
    assert found.entry.config == best
    first, _, last = bench.heats
    assert len(first) > 10
    assert len(last) <= tuning.FINALISTS + 2  # with the default and the library


def test_other_tiles_are_timed_by_themselves():
    """Behind the filler, neighbours of one tile are the fastest; by itself another tile is."""
    tile, other = Config(128, 128, pingpong=True, narrow=True), Config(128, 192, pingpong=True, narrow=True)

    def behind(c, config):
        same = config is not None and config.tile_n == tile.tile_n and config.pingpong
        return 1000.0 if config is None else 800.0 + len(str(config)) if same else 880.0 if config == other else 1500.0

    bench = Bench(behind)
    bench.alone = lambda c, config: 700.0 if config == other else behind(c, config)
    (found,) = run(bench, case(RESIDUAL, default=tile))
    assert (found.winner, found.us) == (other, 700.0)
    assert len({c for _, c in bench.heats[-1]}) <= tuning.FINALISTS + 2
    assert not [c for _, c in bench.heats[-1] if c is not None and behind(None, c) == 1500.0 and c.pingpong]


def test_a_neighbour_of_a_good_tile_is_found():
    good = Config(128, 192, pingpong=True, narrow=True)
    best = Config(128, 192, pingpong=True, narrow=True, cluster_m=1, cluster_n=2, dynamic=True)
    times = {good: 850.0, best: 700.0}
    bench = Bench(lambda c, config: 1000.0 if config is None else times.get(config, 950.0))
    (found,) = run(bench, case(RESIDUAL))
    assert found.winner == best
    assert best not in [c for _, c in bench.heats[0]]


@pytest.mark.parametrize("fault", ["spills", "wrong", "compiles"])
def test_a_faulty_kernel_is_never_timed(fault):
    best = Config(128, 160, pingpong=True, narrow=True)
    faults = {
        "spills": lambda c: 100 if c.tile_n == 160 else 0,
        "wrong": lambda c: c.tile_n == 160,
        "compiles": lambda c: c.tile_n != 160,
    }
    bench = Bench(flat(best), **{fault: faults[fault]})
    (found,) = run(bench, case(RESIDUAL))
    assert found.winner is not None
    assert found.winner.tile_n != 160
    assert not [c for heat in bench.heats for _, c in heat if c is not None and c.tile_n == 160]


WIDE, NARROW = Config(128, 256), Config(128, 256, narrow=True)


@pytest.mark.parametrize(
    "stages,default,timed",
    [
        ({WIDE: 2}, NARROW, {NARROW}),
        ({WIDE: 2}, WIDE, {WIDE, NARROW}),
        ({WIDE: None}, NARROW, {WIDE, NARROW}),
        ({}, NARROW, {WIDE, NARROW}),
    ],
    ids=["few", "the default", "unknown", "all have few"],
)
def test_a_kernel_with_few_stages_is_not_timed(stages, default, timed):
    others = 3 if stages else 2
    bench = Bench(flat(WIDE), stages=lambda c: stages.get(c, others))
    (found,) = run(bench, case(NORM_BACKWARD, default=default))
    assert {c for heat in bench.heats for _, c in heat} & {WIDE, NARROW} == timed
    assert (found.winner == WIDE) == (WIDE in timed)


def test_neighbours_of_a_default_with_few_stages_are_tried():
    best = Config(128, 256, cluster_m=1, cluster_n=2)
    times = {WIDE: 850.0, best: 700.0}
    bench = Bench(
        lambda c, config: 1000.0 if config is None else times.get(config, 950.0),
        stages=lambda c: 2 if (c.tile_n, c.narrow) == (256, False) else 3,
    )
    assert run(bench, case(NORM_BACKWARD, default=WIDE))[0].winner == best


def test_a_default_stays_unless_something_is_clearly_faster():
    default, other = Config(128, 256, narrow=True), Config(128, 160, pingpong=True, narrow=True)
    times = {default: 802.0, other: 800.0}
    bench = Bench(lambda c, config: times.get(config, 1000.0))
    assert run(bench, case(RESIDUAL, default=default))[0].winner == default
    times[other] = 780.0
    found = run(Bench(bench.times), case(RESIDUAL, default=default))[0]
    assert (found.winner, found.default_us) == (other, 802.0)


def test_the_library_keeps_a_bare_gemm_that_it_is_faster_at():
    ours = Config(128, 256)
    for us, winner in ((1100.0, None), (998.0, None), (900.0, ours)):
        bench = Bench(lambda c, config, us=us: 1000.0 if config is None else us if config == ours else 2000.0)
        assert run(bench, case(BARE))[0].winner == winner
    slow = Bench(lambda c, config: 1000.0 if config is None else 1100.0)
    assert run(slow, case(RESIDUAL))[0].winner is not None  # its epilogue cannot run on the library


def test_a_short_budget_leaves_out_neighbours():
    bench = Bench(flat(Config(128, 256)))
    run(bench, case(RESIDUAL), budget=15.0)
    assert len(bench.heats) == 2
    assert not any(c.dynamic for c in bench.compiled)


def test_what_is_known_is_kept_after_every_heat():
    kept = []
    bench = Bench(flat(Config(128, 256)))
    tune([case(RESIDUAL)], bench, budget=1000.0, clock=lambda: bench.now, keep=kept.append)
    assert [len(found) for found in kept] == [1, 1, 1]


def test_alike_programs_are_one_case_at_each_bucket():
    renamed = program("out=to(acc + r, bf16), t=sum_row((acc + r) * (acc + r))", ", r: Tile[4096, bf16]")
    steps = tuple(Step(p, "a", ("b",), (), ()) for p in (RESIDUAL, renamed, BARE))
    found = cases_of([Plan((), (), steps, {})], [16_384, 512, 300])
    assert [(c.program.gemm.form, c.tokens) for c in found] == [
        (form, tokens) for tokens in (16_384, 512) for form in ("nt", "nn")
    ]


def test_the_sizes_of_a_llama_by_hand():
    assert preset_of("4096x14336x32x8x128").ffn == 14_336
    with pytest.raises(SettingsError, match="names no sizes"):
        preset_of("4096x14336")


@pytest.fixture(scope="module")
def llama():
    """The cases of a small Llama."""
    return cases_of(plans_of("256x512x4x2x64", "bf16"), BUCKETS[-1:])


def test_programs_of_every_way_to_keep_values_are_tuned(llama):
    """What lean computes again in an epilogue is another kernel than what fast or balanced stores."""
    behind_gates = [c for c in llama if c.program.name == "down_proj_dgrad"]
    behind_norms = [c for c in llama if c.program.name == "gate_proj_up_proj_dgrad"]
    assert {len(c.lowered.stores) for c in behind_gates} == {2, 3}
    assert {len(c.lowered.stores) for c in behind_norms} == {1, 2}


def test_a_model_is_tuned_from_end_to_end(llama):
    """A small Llama: every program has a winner that it fits, the report names each."""
    cases = llama
    names = {c.program.name for c in cases}
    assert {"o_proj", "down_proj", "down_proj_dgrad"} <= names
    assert sum("wgrad" in name for name in names) >= 4
    bench = Bench(lambda c, config: 1000.0 if config is None else 900.0 + len(str(config)))
    found = run(bench, *cases)
    assert all(f.winner is not None and fits(f.case.lowered, f.winner) for f in found)
    report = Tuning("NVIDIA H200", found, [], [], 1.0).to_json()
    assert len(report["programs"]) == len(cases)
    tried = report["programs"][0]["tried"]
    assert [t["us"] for t in tried] == sorted(900.0 + len(t["config"]) for t in tried)
    assert all(line["winner"] != "library" for line in report["programs"])


EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "epilogues").glob("*.py"))


def test_the_programs_of_files_are_tuned_at_their_sizes(tmp_path, monkeypatch):
    """By the command: each program by its own name, with what was tried; the winner serves from then on."""
    monkeypatch.setenv("CODETTA_CACHE_DIR", str(tmp_path))
    best = Config(128, 160, pingpong=True, narrow=True)
    known = Bench(flat(best))
    bench = SimpleNamespace(
        compile=known.compile, right=known.right, time=known.time, time_alone=known.time_alone, wrong=[]
    )
    monkeypatch.setattr(tune_command, "get_bench", lambda progress: bench)
    called = CliRunner().invoke(app, ["tune", str(EXAMPLES[1]), f"{EXAMPLES[10]}::online_lse", "--json"])
    assert called.exit_code == 0, called.output
    lines = {line["name"]: line for line in json.loads(called.stdout)["programs"]}
    assert lines.keys() == {"residual_rms", "scaled", "online_lse"}
    assert {(line["n"], line["k"], line["tokens"]) for line in lines.values()} == {(4096, 4096, 16_384)}
    assert all(len(line["tried"]) >= 5 for line in lines.values())
    assert (lines["online_lse"]["winner"], lines["online_lse"]["us"]) == (str(best), 800.0)
    (authored,) = load(f"{EXAMPLES[10]}::online_lse")
    (p,), rows = gemms_of(authored, bf16, derived=False)
    assert choosing.choose(p, rows)[1] == best
    choosing.forget()


def product(form: str, a, b, dtype=torch.float32):
    """The GEMM of any form on a CPU."""
    return ((a.float().T if form == "tn" else a.float()) @ (b.float().T if form == "nt" else b.float())).to(dtype)


def emulated(job, made, outputs, factor: float = 1.0) -> None:
    """What a kernel writes, by the generated source: partials as one part and parts that change nothing."""
    found = emulate(job.lowered, product(job.form, made.a, made.b) * factor, made.loads)
    for i, value in found.items():
        out = outputs[i]
        if value.shape == out.shape:
            out[:] = value
        else:
            out[:] = -torch.inf if made.sinks[i].kind == "lse" else 0.0
            out[0 if made.sinks[i].over_rows else (slice(None), 0)] = value


@pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_kernel_is_compared_with_the_reference(llama, monkeypatch, factor):
    """At an odd number of rows; an accumulator that is a tenth too large does not pass."""
    for c in (c for c in llama if c.lowered.cols < 10_000 and c.key.k < 10_000):
        compared(c, monkeypatch, factor)


@pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_so_is_a_file_s(file, monkeypatch):
    for authored in load(str(file)):
        few = {name: min(size, 512) for name, size in authored.sizes.items()} | {"K": 128}
        programs, _ = gemms_of(replace(authored, sizes=few), bf16, derived=True)
        for c in cases_of_programs([p for p in programs if not choosing.is_bare(p)], [512]):
            compared(c, monkeypatch, 1.0)


def compared(c: Case, monkeypatch, factor: float) -> None:
    """A case as the bench of a GPU judges it, its kernel emulated."""
    from codetta.backends.hopper import trial
    from codetta.backends.hopper.gemm import job_with  # QuACK takes seconds to import

    monkeypatch.setattr(trial, "matmul", product)
    monkeypatch.setattr(trial, "compiled", lambda job: job)
    monkeypatch.setattr(trial, "values", lambda lowered, loads, outputs: outputs)
    made = trial.Trial(c, 129, "cpu")
    monkeypatch.setattr(trial, "launch", lambda job, a, b, out, made=made: emulated(job, made, out, factor))
    job = job_with(c.program, c.lowered, space(c.lowered, 256)[0])
    found = list(made.errors(job))
    right = [e < (trial.TILE_ERROR if tile else trial.SUM_ERROR) for tile, e in found]
    assert all(right) == (factor == 1.0), (c.program.name, found)


@pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")
@pytest.mark.slow
def test_a_kernel_that_spills_is_found_out_by_its_code():
    from codetta.backends.hopper.trial import Gpu

    rich = program(
        "h=to((acc + x) * g, bf16), x1=to(acc + x, bf16), s=sum_row((acc + x) * (acc + x))",
        ", x: Tile[4096, bf16], g: RowVec[4096, bf16]",
    )
    picks = [(case(rich), c) for c in (Config(256, 192), Config(128, 256, narrow=True), Config(128, 512))]
    made = Gpu().compile(picks, float("inf"))
    assert made[picks[0]].spills > tuning.SLIGHT
    assert made[picks[1]].spills == 0
    assert picks[2] not in made  # no such tile: it does not compile
