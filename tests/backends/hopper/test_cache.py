"""The cache of compiled kernels: processes at once, half-written files, changed helpers, changed versions."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from codetta.backends.hopper.choose import choose
from codetta.backends.hopper.config import Config
from codetta.lang.source import parse_program

pytestmark = pytest.mark.skipif(find_spec("quack") is None, reason="kernels need codetta[hopper]")
PROGRAM = parse_program(
    '@epilogue(gemm="nt", k=64, dtype=bf16)\n'
    "def p(acc: Tile[128, f32], x: Tile[128, bf16]):\n"
    "    return dict(y=to(acc + x, bf16))\n"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache for this process alone."""
    from codetta.backends.hopper import toolchain  # it prepares QuACK before it imports it

    monkeypatch.setattr(toolchain.quack.cache, "CACHE_DIR", str(tmp_path))
    toolchain.host._compile_gemm_epi.cache_clear()
    yield tmp_path
    toolchain.host._compile_gemm_epi.cache_clear()


NORM_BACKWARD = parse_program(
    '@epilogue(gemm="nt", k=4096, dtype=bf16)\n'
    "def p(acc: Tile[4096, f32], c: Tile[4096, bf16], x: Tile[4096, bf16], g: RowVec[4096, bf16], r: ColVec[f32]):\n"
    "    return dict(d=to(acc * r * g + c, bf16), y=to(x * r, bf16), s=sum_col(acc * x))\n"
)


def build(job=None) -> None:
    from codetta.backends.hopper.gemm import compiled, job_of
    from codetta.backends.hopper.toolchain import host

    host._compile_gemm_epi.cache_clear()
    compiled.__wrapped__(job or job_of(PROGRAM))


def objects(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.o"))


def test_a_half_written_object_is_compiled_again(cache, capsys):
    build()
    (made,) = objects(cache)
    whole = made.read_bytes()
    made.write_bytes(whole[: len(whole) // 3])
    build()
    assert "corrupt" in capsys.readouterr().out
    assert len(made.read_bytes()) == len(whole)


def test_the_second_time_nothing_is_compiled(cache):
    from codetta.backends.hopper.build import is_cached, object_file
    from codetta.backends.hopper.gemm import compiled, job_of

    job = job_of(PROGRAM)
    compiled.cache_clear()
    assert not is_cached(job)
    build()
    assert is_cached(job)
    assert objects(cache) == [object_file(job)]


@pytest.mark.parametrize("narrow,stages", [(False, 2), (True, 3)])
def test_the_stages_of_a_kernel_are_kept_beside_it(cache, narrow, stages):
    """A residual, a tile, two stores and a sum in 128x256: what is left of the shared memory holds two stages, and
    three with subtiles of half the width."""
    from codetta.backends.hopper.build import object_file
    from codetta.backends.hopper.gemm import job_with
    from codetta.backends.hopper.stages import stages_of

    job = job_with(NORM_BACKWARD, choose(NORM_BACKWARD)[0], Config(128, 256, narrow=narrow))
    assert stages_of(object_file(job)) is None
    build(job)
    (made,) = objects(cache)
    assert made == object_file(job)
    assert stages_of(made) == stages
    assert not list(cache.rglob("*.tmp.*"))


def test_processes_that_want_the_same_kernel(tmp_path):
    """Both get it, and there is one object, whole."""
    from codetta.backends.hopper.binary import resources
    from codetta.backends.hopper.gemm import job_of
    from codetta.backends.hopper.toolchain import compiling_environment

    environment = {**compiling_environment(), "QUACK_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "codetta.backends.hopper.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    workers = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
    answers = [w.communicate(pickle.dumps(job_of(PROGRAM)))[0] for w in workers]
    assert answers == [b"compiled\n"] * 2
    (made,) = objects(tmp_path)
    assert resources(made).registers > 0
    assert not list(tmp_path.rglob("*.tmp.*"))


@pytest.mark.parametrize("change", ["helper", "version"])
def test_what_changed_is_not_found(cache, tmp_path, monkeypatch, change):
    import cutlass
    import quack.cache
    from quack.cache.jit import _compute_source_fingerprint

    (ours,) = quack.cache.EXTRA_SOURCE_DIRS
    before = _compute_source_fingerprint()
    if change == "helper":
        copy = tmp_path / "device"
        shutil.copytree(ours, copy)
        with (copy / "dialect.py").open("a") as file:
            file.write("# changed\n")
        monkeypatch.setattr(quack.cache, "EXTRA_SOURCE_DIRS", [copy])
    else:
        monkeypatch.setattr(cutlass, "__version__", "0.0.0")
    _compute_source_fingerprint.cache_clear()
    try:
        assert _compute_source_fingerprint() != before
    finally:
        monkeypatch.undo()
        _compute_source_fingerprint.cache_clear()


def test_a_kernel_is_known_by_its_source_and_binding():
    """Programs that differ in one operator, one constant or one column have different kernels."""
    texts = {
        "acc + x": "y=to(acc + x, bf16)",
        "acc - x": "y=to(acc - x, bf16)",
        "constant": "y=to(acc + x * 2.0, bf16)",
        "other constant": "y=to(acc + x * 3.0, bf16)",
        "dtype": "y=to(acc + x, f32)",
    }
    found = set()
    for body in texts.values():
        program = parse_program(
            '@epilogue(gemm="nt", k=64, dtype=bf16)\n'
            f"def p(acc: Tile[128, f32], x: Tile[128, bf16]):\n    return dict({body})\n"
        )
        found.add(choose(program)[0].digest)
    assert len(found) == len(texts)
