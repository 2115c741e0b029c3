"""What programs are as kernels: how each would run, and what its compiled code uses. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from codetta.backends.hopper.binary import resources
from codetta.backends.hopper.build import compile_all, object_file
from codetta.backends.hopper.choose import is_bare, why_split
from codetta.backends.hopper.gemm import Job, compiled, job_of
from codetta.backends.hopper.stages import shared_of, stages_of
from codetta.ir.program import Program


@dataclass(frozen=True, slots=True)
class Built:
    """One kernel: its tile and configuration; registers and stack bytes of a thread; spill instructions in code; the
    pipeline's stages and the block's bytes of shared memory (None: compiled before these were kept)."""

    tile: tuple[int, int]
    config: str
    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    stages: int | None
    shared_bytes: int | None


@dataclass(frozen=True, slots=True)
class Other:
    """How a program runs that is no kernel of ours with its GEMM in it, and why: "library" (a bare GEMM), "split" (that
    and a generated map behind it), "rows" (a generated kernel without a GEMM), or "failed", not at all."""

    kind: str
    reason: str


def built(programs: Sequence[Program], rows: int) -> list[Built | Other]:
    """How each program runs at a number of tokens; what is a kernel of ours is compiled for SM90."""
    found = [_way(p, rows) for p in programs]
    jobs = {way: p.name for p, way in zip(programs, found, strict=True) if isinstance(way, Job)}
    with suppress(Exception):  # told below, with the kernel that it is about
        compile_all(jobs)
    return [_read(way) if isinstance(way, Job) else way for way in found]


def _way(program: Program, rows: int) -> Job | Other:
    if program.gemm is None:
        return Other("rows", "a generated kernel, compiled when it first runs on a GPU")
    if is_bare(program):
        return Other("library", "a GEMM without an epilogue")
    reason = why_split(program)
    return Other("split", reason) if reason is not None else job_of(program, rows)


def _read(job: Job) -> Built | Other:
    try:
        compiled(job)
    except Exception as error:  # whatever the compiler raises
        first = (str(error).strip().splitlines() or [""])[0]
        return Other("failed", f"it does not compile: {type(error).__name__}: {first}")
    file, config = object_file(job), job.config
    used = resources(file)
    return Built(
        (config.tile_m, config.tile_n),
        str(config),
        used.registers,
        used.stack,
        used.spill_stores,
        used.spill_loads,
        stages_of(file),
        shared_of(file),
    )
