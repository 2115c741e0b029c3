"""Kernels compiled side by side, in worker processes that need no GPU, with a line that says what is compiled."""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from codetta.backends.hopper import counters
from codetta.backends.hopper.choose import own_kernel
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.gemm import Job, compiled, job_of
from codetta.backends.hopper.stages import kernel_file
from codetta.backends.hopper.toolchain import compiling_environment, has_device
from codetta.partition.plan import Plan

# isort: split
import quack.cache
from quack.cache import async_compile
from quack.gemm_runtime import host

WORTH_WORKERS = 3  # a worker takes seconds to start: fewer kernels than that are compiled here
MAX_WORKERS = 16


def jobs_of(plans: Iterable[Plan], batch_invariant: bool = False, rows: int | None = None) -> dict[Job, str]:
    """The kernels of some plans at a number of tokens, each once, with the name of a program that it is for."""
    found: dict[Job, str] = {}
    for step in (s for plan in plans for s in plan.steps if s.kind == "gemm"):
        if own_kernel(step.program, rows, batch_invariant):
            try:
                job = job_of(step.program, None if batch_invariant else rows)
                found.setdefault(job, step.program.name)
            except NotLowered:  # a GEMM and a map behind it
                continue
    return found


def compile_all(jobs: dict[Job, str]) -> None:
    """Compile, or load from the cache, every kernel; afterwards ``compiled(job)`` returns at once."""
    begin(jobs)()


def begin(jobs: dict[Job, str]) -> Callable[[], None]:
    """Begin with ``compile_all``: processes compile what the cache lacks while this one goes on. What is returned waits
    for them, and loads everything."""
    if has_device():  # before a graph is recorded
        counters.prepare(torch.cuda.current_device())
    missing = [job for job in jobs if not is_cached(job)]
    open_until_done = ExitStack()
    done = open_until_done.enter_context(_progress(len(missing)))
    here = missing if len(missing) < WORTH_WORKERS else []
    threads = [] if here else _started(missing, lambda job: done(jobs[job]))

    def finish() -> None:
        with open_until_done:
            for t in threads:
                t.join()
            for job in here:
                compiled(job)
                done(jobs[job])
        for job in jobs:
            compiled(job)

    return finish


class _Probe:
    """In the place of QuACK's pool of compile workers: a kernel that is not in the cache is not compiled."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def poll(self, sha: str) -> tuple[str, None]:
        self.asked.append(sha)
        return "new", None

    def submit(self, *given: Any) -> bool:
        return True

    def mark_external(self, *given: Any) -> None:
        """Another process compiles it."""


@contextmanager
def _probing() -> Iterator[_Probe]:
    before, async_compile._active_pool = async_compile._active_pool, _Probe()
    try:
        yield async_compile._active_pool
    finally:
        async_compile._active_pool = before


def is_cached(job: Job) -> bool:
    """Whether a kernel need not be compiled; if so it is loaded."""
    with _probing():
        try:
            compiled(job)
        except async_compile.CompilePending:
            return False
    return True


def object_file(job: Job) -> Path:
    """Where in the cache a kernel's object is, compiled or not."""
    known, quack.cache.CACHE_DIR = quack.cache.CACHE_DIR, tempfile.mkdtemp()
    loaded = host._compile_gemm_epi
    loaded.cache_clear()
    try:
        with _probing() as probe, suppress(async_compile.CompilePending):
            compiled.__wrapped__(job)
    finally:
        shutil.rmtree(quack.cache.CACHE_DIR)
        quack.cache.CACHE_DIR = known
    return kernel_file(probe.asked[-1])


def in_workers(
    jobs: list[Job], done: Callable[[Job], None], workers: int = MAX_WORKERS, seconds: float = float("inf")
) -> None:
    """Compile in processes of their own; after that many seconds no more is begun."""
    for t in _started(jobs, done, workers, seconds):
        t.join()


def _started(
    jobs: list[Job], done: Callable[[Job], None], workers: int = MAX_WORKERS, seconds: float = float("inf")
) -> list[threading.Thread]:
    """Threads that wait for those processes."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    number = min(len(jobs), os.cpu_count() or 1, workers)
    threads = [threading.Thread(target=_feed, args=(waiting, done, perf_counter() + seconds)) for _ in range(number)]
    for t in threads:
        t.start()
    return threads


def _feed(waiting: queue.SimpleQueue[Job], done: Callable[[Job], None], end: float) -> None:
    """One worker process, fed until nothing waits; if it dies, the kernels that are left are compiled elsewhere."""
    command = [sys.executable, "-m", "codetta.backends.hopper.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=compiling_environment(), **pipes) as worker:  # type: ignore[call-overload]
        while perf_counter() < end:
            try:
                job = waiting.get_nowait()
                pickle.dump(job, worker.stdin)
                worker.stdin.flush()
            except (queue.Empty, BrokenPipeError):
                break
            if not worker.stdout.readline():
                break
            done(job)
        worker.stdin.close()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A line on a terminal's standard error; nothing elsewhere, and nothing if there is nothing to do."""
    console = Console(stderr=True)
    columns = [TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    name = TextColumn("{task.fields[name]}", style="dim")
    quiet = not console.is_terminal or not total
    with Progress(*columns, name, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=total, name="")
        yield lambda text: bar.update(task, advance=1, name=text)
