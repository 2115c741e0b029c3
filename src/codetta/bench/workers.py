"""Fresh processes that run one contender each: they are told what to do, answer, and end with whoever started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Any

from codetta.bench.model_run import Asked, Found

LOOK = 0.2  # seconds between looks at whether a silent process is still there


def caches_in(folder: Path) -> tuple[str, ...]:
    """Settings of the environment with which everything that is compiled is kept in a folder."""
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CODETTA_CACHE_DIR": "codetta"}
    return tuple(f"{name}={folder / place}" for name, place in places.items())


class Worker:
    """A process and the last thing it said. With a note, what it found is final: the process is gone."""

    def __init__(self, asked: Asked, environment: Sequence[str] = ()) -> None:
        self.asked, self.environment, self.found = asked, environment, Found()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in end()
        self._answers: SimpleQueue[Found] = SimpleQueue()
        self._built = False
        path = f"PYTHONPATH={os.pathsep.join(p for p in sys.path if p)}"
        command = [
            "env",
            path,
            *environment,
            sys.executable,
            "-m",
            "codetta.bench.model_run",
            json.dumps(asdict(asked)),
        ]
        # a session of its own, so that the compilers that it started end with it
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, duty: str, seconds: float, **given: Any) -> Found:
        """What is known behind a duty. A process that fails, dies or takes longer is ended, and its note says why."""
        until = monotonic() + seconds
        if not self._built:
            self._built = self._await(until, seconds)
        if not self.found.note:
            with suppress(BrokenPipeError):  # it died: the note says so
                self._input.write(json.dumps({"do": duty, **given}) + "\n")
                self._input.flush()
            self._await(until, seconds)
        return self.found

    def end(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(1.0)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]  # pipes, as asked for

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @property
    def _input(self) -> Any:
        return self._process.stdin

    def _read(self) -> None:
        for line in self._process.stdout or ():
            with suppress(json.JSONDecodeError, TypeError):
                self._answers.put(Found(**json.loads(line)))

    def _await(self, until: float, seconds: float) -> bool:
        """Take the next answer; whether there was one."""
        while True:
            dead = self._process.poll() is not None  # asked first: the last answer is not missed
            if dead:
                self._reader.join(1.0)
            with suppress(Empty):
                self.found = self._answers.get(timeout=LOOK)
                return True
            if dead:
                self.found.note = self.found.note or f"the process ended with {self._process.returncode}: {self._said}"
                return False
            if monotonic() > until:
                self.found.note = f"ended after {seconds:.0f} s"
                self.end()
                return False

    @property
    def _said(self) -> str:
        """The last line of the error stream."""
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or [""])[-1][:250]
