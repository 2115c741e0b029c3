"""`codetta check` notices what is wrong, says where, and passes what is right."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from authored import HEAD, SWIGLU, written
from codetta.author import check as check_module
from codetta.author import measured
from codetta.author.bind import Draw, compiled_form, draws, multiples, real_sizes
from codetta.author.check import check, failure
from codetta.author.compare import difference
from codetta.author.conditions import conditions, derived
from codetta.author.file import load
from codetta.author.kernels import Kernel, kernels, parts_of
from codetta.author.tables import _kernels
from codetta.author.template import write_new
from codetta.autodiff.vjp import VJP
from codetta.bench import check as bench_check
from codetta.errors import AuthorError, BlockLocalError, UnsupportedError
from codetta.ir import ops
from codetta.ir.build import mul

EXAMPLES = Path(__file__).parents[2] / "examples" / "epilogues"

needs_quack = pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")


def wrong(folder: Path, text: str) -> dict[tuple[str, str], str]:
    """What differs, by kind and name, with the message."""
    report = check(written(folder, text), quick=True)
    return {(c.kind, c.name): str(c) for p in report.programs for c in p.comparisons if not c.ok}


def test_what_is_right_passes(tmp_path):
    report = check(written(tmp_path, SWIGLU), quick=True)
    (found,) = report.programs
    assert report.ok
    kinds = {kind: {c.name for c in found.comparisons if c.kind == kind} for kind in ("value", "stored", "gradient")}
    assert kinds["value"] == kinds["stored"] == {"z", "y", "ssq"}
    assert kinds["gradient"] == {"d_operand", "d_weight", "d_bias", "d_rstd", "d_next_weight"}
    assert {s.what for s in found.skipped} == {"kernels", "running and timing on a GPU"}


@pytest.mark.parametrize(
    "right, mutant, output",
    [
        ("silu(gate) * up", "silu(up) * gate", "y"),
        ("acc * rstd + bias", "acc * rstd - bias", "z"),
        ("acc * rstd + bias", "acc * rstd", "z"),
        ("sum_row(z * z)", "sum_row(z * acc)", "ssq"),
        ("sum_row(z * z)", "sum_row(z * z * (1.0 + 1e-6))", "ssq"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, right, mutant, output):
    program, reference = SWIGLU.split("def swiglu_reference")
    found = wrong(tmp_path, program.replace(right, mutant) + "def swiglu_reference" + reference)
    assert ("value", output) in found
    assert f"{output}[" in found["value", output]
    assert "expected" in found["value", output]


@pytest.mark.parametrize("op", [ops.SILU, ops.MUL, ops.REDUCE, ops.PART], ids=lambda op: op.name)
def test_a_wrong_derivative_shows_in_gradients_alone(tmp_path, monkeypatch, op):
    right = VJP[op]
    monkeypatch.setitem(VJP, op, lambda n, g: tuple(None if d is None else mul(d, 1.001) for d in right(n, g)))
    found = wrong(tmp_path, SWIGLU)
    assert {kind for kind, _ in found} == {"gradient"}
    assert ("gradient", "d_weight") in found


def test_the_place_and_the_values_are_those_of_the_largest_error():
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    got = want.clone()
    got[1, 0] = 3.5
    found = difference(got, want)
    assert (found.place, found.expected, found.got) == ((1, 0), 3.0, 3.5)
    assert found.error == pytest.approx(0.5 / (3 + math.sqrt(7.5)))
    assert difference(got * math.nan, want).error == math.inf
    assert difference(None, want).problem
    assert "shape" in difference(want[0], want).problem


def test_a_zero_that_is_left_of_terms_that_cancel_is_no_error():
    noise = torch.tensor([3e-16, -2e-15], dtype=torch.float64)
    assert difference(noise, torch.zeros_like(noise)).error < 1e-9
    assert difference(noise + 1e-9, torch.zeros_like(noise)).error > 1e-9
    assert difference(noise.float() + 1e-9, torch.zeros_like(noise)).error > 1  # as stored: over what is expected alone


def test_a_head_over_its_own_sum(tmp_path):
    """In a group of one column the gradient is zero, and both sides are the rounding of terms that cancel."""
    text = """
@epilogue
def share(acc: Tile):
    return dict(y=acc / maximum(sum_inside(abs(acc), groups=8), 1e-6))

def share_reference(acc):
    x = acc.unflatten(1, (8, -1))
    return dict(y=(x / x.abs().sum(-1, keepdim=True).clamp(min=1e-6)).flatten(1))
"""
    assert not wrong(tmp_path, "from codetta import maximum\n" + text)
    assert ("gradient", "d_weight") in wrong(
        tmp_path, "from codetta import maximum\n" + text.replace("x.abs()", "x.detach().abs()")
    )
    (authored,) = load(written(tmp_path, "from codetta import maximum\n" + text))
    assert all(d.sizes["N"] >= 16 for d in draws(authored.program, quick=False))


def test_functions_of_numbers_alone_are_as_exact_as_the_rest(tmp_path):
    text = """
from codetta import const

@epilogue
def scaled(acc: Tile):
    return dict(y=acc * rsqrt(const(0.3)) + exp(const(2)))

def scaled_reference(acc):
    return dict(y=acc * 0.3**-0.5 + 7.38905609893065)
"""
    assert not wrong(tmp_path, text)
    assert ("value", "y") in wrong(tmp_path, text.replace("7.38905609893065", "7.389056"))


@pytest.mark.parametrize("other", ["acc", "torch.cat([acc] * 4, 1)", "acc[:, :1]", "acc[0]", "acc.sum()"])
def test_an_output_of_another_shape_is_told(tmp_path, other):
    text = f"""
@epilogue
def product(acc: Tile["2*N"], bias: RowVec):
    a, b = halves(acc)
    return dict(z=acc, y=a * b)

def product_reference(acc, bias):
    return dict(z=acc, y={other})
"""
    found = wrong(tmp_path, text)
    assert found.keys() == {("value", "y")}
    assert "it has the shape (1, " in found["value", "y"]


def test_one_of_several_outputs_that_names_a_parameter(tmp_path):
    text = """
@epilogue
def clash(acc: Tile, x: Tile, g: RowVec):
    return dict(g=acc * g, x=(acc * g + x) * g)

def clash_reference(acc, x, g):
    return dict(g=acc * g, x=(acc * g + x) * g)
"""
    assert not wrong(tmp_path, text)


def test_steps_without_a_gemm(tmp_path):
    text = """
@finalize
def scale(ssq: ColVec):
    return rsqrt(ssq / 64.0 + 1e-6)

def scale_reference(ssq):
    return 1 / (ssq / 64 + 1e-6).sqrt()

@leftover
def softmax(x: Tile, gain: RowVec):
    e = exp(x)
    return e / sum_row(e) * gain

def softmax_reference(x, gain):
    return torch.softmax(x, 1) * gain
"""
    assert not wrong(tmp_path, text)
    assert ("gradient", "d_ssq") in wrong(
        tmp_path, text.replace("1 / (ssq / 64 + 1e-6).sqrt()", "(ssq.detach() / 64 + 1e-6) ** -0.5")
    )


def test_stored_dtypes_are_looked_at(tmp_path):
    text = """
@epilogue
def big(acc: Tile):
    return dict(y=to(acc * 1e6, f16))

def big_reference(acc):
    return dict(y=acc * 1e6)
"""
    assert {kind for kind, _ in wrong(tmp_path, text.replace("f16", "f32"))} == set()
    found = wrong(tmp_path, "from codetta import f16\n" + text)
    assert {kind for kind, _ in found} == {"stored"}


def test_inputs_may_be_put_in_range(tmp_path):
    text = """
@epilogue
def pick(acc: Tile, target: ColVec[i64]):
    return dict(y=acc, p=select_column(acc, target))

def pick_reference(acc, target):
    return dict(y=acc, p=torch.where(target < 3, acc.gather(1, target[:, None])[:, 0], 0.0))
"""
    assert ("value", "p") in wrong(tmp_path, text)
    hook = "\ndef pick_inputs(inputs):\n    return dict(target=inputs['target'] % 3)\n"
    assert not wrong(tmp_path, text + hook)


def test_draws_are_ragged_and_fit_the_splits(tmp_path):
    text = """
@epilogue
def rope(acc: Tile, c: Table["N/8"], gain: GroupVec):
    a, b = halves(acc, groups=4)
    return join_halves(a * c, b * c, groups=4) * gain

def rope_reference(acc, c, gain):
    return acc * torch.cat([c, c], 1).repeat(1, 4) * gain.repeat_interleave(acc.shape[1] // gain.shape[1], 1)
"""
    (authored,) = load(written(tmp_path, text))
    assert multiples(authored.program)["N"] == 8
    found = list(draws(authored.program, quick=False))
    assert [d.rows for d in found][:2] == [1, 127]
    assert all(d.sizes["N"] % (8 * d.sizes["G"]) == 0 for d in found)
    assert any(d.sizes["N"] % 128 for d in found)
    assert all(d.inner % 8 for d in found[:1]) or len({d.inner for d in found}) > 1
    assert not wrong(tmp_path, text)


# --- files that cannot be checked -------------------------------------------------------------------------------------

GOOD = "@epilogue\ndef f(acc: Tile, g: RowVec):\n    return dict(y=acc * g)\n\n"


@pytest.mark.parametrize(
    "text, message, hint",
    [
        ("x = 1\n", "holds no program", "codetta new"),
        ("def f(:\n", "is no Python", ""),
        ("from codetta import nothing\n", "cannot be run", "from codetta import"),
        (GOOD, "f has no reference", "def f_reference(acc, g):"),
        (
            GOOD + "def f_reference(acc, gain):\n    return dict(y=acc)\n",
            "takes (acc, gain)",
            "def f_reference(acc, g):",
        ),
        (GOOD + "def f_reference(acc, g):\n    return dict(z=acc)\n", "returns a dict of z", "return dict(y=...)"),
        (GOOD + "def f_reference(acc, g):\n    pass\n", "returns nothing", "return dict(y=...)"),
        (GOOD + "def f_reference(acc, g):\n    return dict(y=acc @ g[:3])\n", "f_reference fails", "acc ("),
        (GOOD + "def f_reference(acc, g):\n    return dict(y=acc / 0)\n", "no finite number for y", "def f_inputs"),
        (GOOD + "def f_reference(acc, g):\n    return acc * g\nf_SIZES = {'N': 'all'}\n", "no sizes", "f_SIZES = {"),
        (
            GOOD + "def f_reference(acc, g):\n    return dict(y=acc * g)\nf_SIZES = {'Q': 3}\n",
            "no size called Q",
            "K, M, N",
        ),
    ],
)
def test_a_file_that_cannot_be_checked_says_what_is_missing(tmp_path, text, message, hint):
    with pytest.raises(AuthorError) as caught:
        check(written(tmp_path, text), quick=True)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_program_that_is_not_there(tmp_path):
    place = written(tmp_path, SWIGLU)
    assert [p.name for p in check(f"{place}::swiglu", quick=True).programs] == ["swiglu"]
    with pytest.raises(AuthorError, match="no program called geglu"):
        check(f"{place}::geglu", quick=True)
    with pytest.raises(AuthorError, match="no file"):
        check(str(tmp_path / "nothing.py"))


def test_an_error_of_the_language_is_told_as_it_is(tmp_path):
    text = "@epilogue\ndef f(acc: Tile):\n    return acc * sum_row(acc)\n"
    place = written(tmp_path, text)
    with pytest.raises(BlockLocalError) as caught:
        check(place)
    found = failure(place, caught.value)
    assert found["ok"] is False
    assert found["error"]["kind"] == "BlockLocalError"
    assert found["error"]["where"].endswith("return acc * sum_row(acc)")
    assert "in the next program" in found["error"]["write"]


# --- real sizes -------------------------------------------------------------------------------------------------------


def test_the_compiled_form_stores_and_reads_sixteen_bits(tmp_path):
    (authored,) = load(written(tmp_path, SWIGLU + "\nswiglu_SIZES = {'N': 512, 'K': 256}\n"))
    sizes = real_sizes(authored.program, authored.sizes)
    assert sizes == {"K": 256, "M": 16384, "N": 512}
    program = compiled_form(authored.program, sizes)
    assert [str(p.type) for p in program.params] == ["Tile[M, 1024, f32]", "RowVec[1024, bf16]", "ColVec[M, f32]"]
    stored = {name: str(n.type) for name, n in program.outputs}
    assert stored == {"z": "Tile[M, 1024, bf16]", "y": "Tile[M, 512, bf16]", "ssq": "ColVec[M, f32]"}
    assert (program.gemm.form, program.gemm.k) == ("nt", 256)


@needs_quack
def test_kernels_are_compiled_and_told(tmp_path):
    file = write_new("mine", tmp_path)
    (found,) = json.loads(json.dumps(check(str(file)).to_json()))["programs"]
    assert found["ok"]
    own = [k for k in found["kernels"] if k["kind"] == "kernel"]
    assert {k["phase"] for k in own} >= {"forward", "backward"}
    for k in own:
        assert 0 < k["registers"] <= 168
        assert k["spill_stores"] == 0
        assert k["stages"] >= 3
        assert 100_000 < k["shared_bytes"] <= 227 * 1024 + 1024
        assert k["limited_by"] == "arithmetic"
    assert [p["name"] for p in found["backward"]] == ["next_dgrad", "finalize_d_bias", "weight_dgrad", "operand_wgrad"]
    assert found["conditions"] == {"right": True, "one_kernel": True, "no_spills": True}


def test_the_conditions_and_what_is_derived():
    forward = Kernel("f", "forward", "kernel", spill_stores=0, spill_loads=0)
    spilling = replace(forward, phase="backward", spill_stores=3, spill_loads=2)
    split, made = Kernel("f", "forward", "split"), Kernel("f", "backward", "rows")
    assert str(conditions(True, [forward, spilling])) == "right, one kernel, no spills"
    assert str(conditions(True, [replace(spilling, phase="forward")])) == "right, one kernel, spills"
    assert str(conditions(False, [split])) == "wrong, no single kernel"
    assert str(conditions(True, [])) == "right, kernels not looked at"
    assert derived([forward, spilling, made, made]) == "kernel 1, generated 2, spilling 1"
    assert derived([forward]) == ""


def test_the_table_of_kernels_is_whole_on_a_page():
    """What a step is, and why it is slow, is not cut off, however long the program's name is."""
    forward = Kernel("f", "forward, in training", "kernel", config="128x160 pp narrow", registers=168, spill_stores=6)
    long = replace(forward, program="residual_rms_backward", spill_loads=14, stages=6, shared_bytes=230_000)
    console = Console(width=120, record=True, file=io.StringIO())
    few = replace(long, program="f", spill_stores=0, spill_loads=0, stages=2)
    console.print(_kernels([long, Kernel("next_dgrad", "backward", "split"), few]))
    lines = console.export_text().splitlines()
    assert len(lines) == 4
    assert "in training  one kernel 128x160 pp narrow" in lines[1]
    assert lines[1].rstrip().endswith("spills")
    assert "GEMM + generated" in lines[2]
    assert lines[2].rstrip().endswith("a second pass")
    assert lines[3].rstrip().endswith("pipeline stages")


@needs_quack
@pytest.mark.parametrize(
    "body, reference, reason, write",
    [
        (
            "r = rsqrt(sum_inside(left * left, groups=4) + 1.0)\n"
            "    return dict(y=join_halves(left * r, right, groups=4))",
            "x = acc.unflatten(1, (4, -1)); a, b = x.chunk(2, -1)\n"
            "    return dict(y=torch.cat([a / (a.square().sum(-1, keepdim=True) + 1).sqrt(), b], -1).flatten(1))",
            "sum_inside takes one lane of each head",
            "r = rsqrt(sum_inside(acc * acc, groups=4) + 1.0)",
        ),
        (
            "s = sum_row(left * left + right)\n    return dict(y=acc, s=s)",
            "a, b = acc.unflatten(1, (4, -1)).chunk(2, -1)\n    return dict(y=acc, s=(a * a + b).sum((1, 2)))",
            "this kernel stores whole rows, and sums over whole rows",
            "s = sum_row(join_halves(left * left + right, 0.0, groups=4))",
        ),
        (
            "m = acc > 0\n    return dict(y=acc, m=m)",
            "return dict(y=acc, m=acc > 0)",
            "m is stored as boolean",
            "m=where(m, 1.0, 0.0)",
        ),
    ],
)
def test_what_is_no_single_kernel_gets_advice(tmp_path, body, reference, reason, write):
    text = f"""
@epilogue
def slow(acc: Tile):
    left, right = halves(acc, groups=4)
    {body}

def slow_reference(acc):
    {reference}
"""
    (found,) = check(written(tmp_path, text)).programs
    assert found.kernels[0].kind == "split"
    assert found.kernels[0].limited_by == "a second pass over memory"
    assert found.conditions.one_kernel is False
    assert reason in found.advice.reason
    assert write in found.advice.write
    assert found.advice.where.text.startswith(body.split(" =")[0])


@needs_quack
def test_a_kernel_that_does_not_compile_fails_the_check(tmp_path, monkeypatch):
    from codetta.backends.hopper import build, built

    def broken(job: object) -> None:
        raise RuntimeError("no such instruction\nat line 3")

    monkeypatch.setattr(build, "compiled", broken)
    monkeypatch.setattr(built, "compiled", broken)
    report = check(str(write_new("mine", tmp_path)))
    (found,) = report.programs
    assert not report.ok
    assert all(c.ok for c in found.comparisons)
    assert found.kernels[0].kind == "failed"
    assert found.kernels[0].reason == "it does not compile: RuntimeError: no such instruction"


# --- the GPU's part, on a CPU -----------------------------------------------------------------------------------------


def test_running_and_timing_without_a_gpu_is_the_same_code(tmp_path, monkeypatch):
    """The reference backend in the place of the kernels: what is run, compared and timed is the same."""
    monkeypatch.setattr(measured, "BACKEND", "reference")
    monkeypatch.setattr(measured, "DEVICE", "cpu")
    monkeypatch.setattr(measured, "CHECKED_ROWS", 33)
    sizes = {"M": 64, "N": 32, "K": 16}
    (authored,) = load(written(tmp_path, SWIGLU + f"\nswiglu_SIZES = {sizes}\n"))
    program = compiled_form(authored.program, sizes)
    parts, _ = parts_of(program)
    compared = measured.on_gpu(authored, program, parts[0].plan, sizes)
    assert {c.name for c in compared} == {"z", "y", "ssq"}
    assert all(c.ok for c in compared)
    found = measured.times(authored, program, parts, [measured.Kernel(p.name, p.phase, "kernel") for p in parts], 64)
    assert found[0].phase == "forward"
    assert not [m.note for m in found if m.note]
    assert all(m.us > 0 and m.ratio > 0 for m in found)
    assert found[0].compile_us > 0


@pytest.mark.parametrize("example", ["08_dropout.py", "10_row_amax.py"])
def test_what_is_timed_is_checked_at_its_real_size(example, monkeypatch):
    """Random numbers hang on a row's number, however many rows are compared at once; a GEMM over 4,096 features gives
    numbers of about one, of which no sigmoid vanishes in float32."""
    monkeypatch.setattr(measured, "BACKEND", "reference")
    monkeypatch.setattr(measured, "DEVICE", "cpu")
    monkeypatch.setattr(bench_check, "ROWS_AT_ONCE", 16)
    authored = load(str(EXAMPLES / example))[0]
    parts, _ = parts_of(compiled_form(authored.program, {"M": 48, "N": 32, "K": 4096}))
    found = measured.times(
        authored, authored.program, parts, [measured.Kernel(p.name, p.phase, "kernel") for p in parts], 48
    )
    assert len(found) == len(parts)
    assert not any(m.is_wrong for m in found)
    assert all(m.us > 0 for m in found)


def test_what_is_wrong_at_its_real_size_fails(tmp_path, monkeypatch):
    """A kernel that is right on few rows and wrong on many."""
    (authored,) = load(written(tmp_path, SWIGLU))
    monkeypatch.setattr(check_module, "why_not", lambda: None)
    monkeypatch.setattr(check_module, "on_gpu", lambda *_: [])
    wrong = measured.Measured("swiglu", "forward", note="swiglu: y is 0.4 off", is_wrong=True)
    monkeypatch.setattr(check_module, "times", lambda *_: [wrong])
    report = check(written(tmp_path, SWIGLU))
    assert all(c.ok for c in report.programs[0].comparisons)
    assert not report.ok
    assert not report.programs[0].conditions.right
    assert authored.name == report.programs[0].name


def test_kernels_say_why_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr("codetta.backends.why_not_installed", lambda: "quack-kernels is not installed")
    (authored,) = load(written(tmp_path, SWIGLU))
    parts, _ = parts_of(compiled_form(authored.program, real_sizes(authored.program, {})))
    with pytest.raises(UnsupportedError, match="quack-kernels is not installed"):
        kernels(parts, 64)
    (found,) = check(written(tmp_path, SWIGLU)).programs
    assert found.ok
    assert {s.what: s.why for s in found.skipped}["kernels"].endswith("quack-kernels is not installed")


def test_draws_say_their_sizes():
    assert str(Draw(3, {"N": 5}, 7, 2)) == "M=3, N=5, K=7, seed=2"
    assert HEAD
