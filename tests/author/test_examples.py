"""The twelve worked examples: right, one kernel each, without spills; the derived backward is the one by hand."""

import dis
from importlib.util import find_spec
from pathlib import Path

import pytest

from codetta.author.bind import compiled_form, real_sizes
from codetta.author.check import check
from codetta.author.file import Authored, load
from codetta.backends import as_kernels
from codetta.backends.hopper.choose import why_split

ROOT = Path(__file__).parents[2] / "examples" / "epilogues"
FILES = sorted(ROOT.glob("*.py"))
PROGRAMS = [authored for file in FILES for authored in load(str(file))]
EPILOGUES = [a for a in PROGRAMS if a.program.role == "epilogue"]
SAMPLE = ("qk_norm_rope", "dropout_residual")  # what no model of test_spills has: wide heads' norm, random numbers
needs_quack = pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")


def real(authored: Authored):
    return compiled_form(authored.program, real_sizes(authored.program, authored.sizes))


def test_there_are_twelve_in_order():
    assert [f.name[:3] for f in FILES] == [f"{i:02}_" for i in range(1, 13)]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_values_and_gradients_are_right(file):
    found = check(str(file), quick=True)
    assert not [f"{p.name} {c.kind} {c}" for p in found.programs for c in p.comparisons if not c.ok]
    assert all({"value", "stored", "forward", "gradient"} <= {c.kind for c in p.comparisons} for p in found.programs)


@pytest.mark.parametrize("authored", EPILOGUES, ids=lambda a: f"{a.file.stem[:2]}-{a.name}")
def test_each_is_one_kernel_at_the_size_that_is_promised(authored):
    program = real(authored)
    assert why_split(program) is None
    assert (program.params[0].type.cols, program.gemm.k, authored.sizes["M"]) == (4096, 4096, 16_384)


@needs_quack
def test_a_sample_compiles_without_spills():
    built = as_kernels([real(a) for a in EPILOGUES if a.name in SAMPLE], 16_384)
    assert len(built) == len(SAMPLE)
    assert not [b for b in built if b.stack_bytes or b.spill_stores or b.spill_loads]
    assert all(0 < b.registers <= 168 for b in built)


@pytest.mark.parametrize("authored", PROGRAMS, ids=lambda a: f"{a.file.stem[:2]}-{a.name}")
def test_a_reference_is_plain_pytorch(authored):
    scope = authored.reference.__globals__
    names = {i.argval for i in dis.get_instructions(authored.reference) if i.opname == "LOAD_GLOBAL"}
    used = [scope[name] for name in names & scope.keys()]
    assert not [u for u in used if getattr(u, "__module__", "").startswith("codetta.")]


def test_the_derived_backward_is_the_one_by_hand():
    forward, backward = (a.epilogue for a in load(str(ROOT / "12_rms_backward.py")))
    assert forward.vjp("h")[0].outputs == backward.program.outputs
