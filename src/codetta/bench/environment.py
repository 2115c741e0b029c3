"""What times depend on: the GPU, its clock and power while it is measured, versions, the commit, the date."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

import codetta

PACKAGES = (
    "transformers",
    "triton",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "liger-kernel",
    "flash-attn-4",
    "flashinfer-python",
)
QUERY = ("clocks.sm", "power.draw", "temperature.gpu")
EVERY_MS = 100


def environment() -> dict[str, Any]:
    """As JSON. What cannot be found out is None."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "power_limit_w": _power_limit() if gpu else None,
        "codetta": codetta.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in PACKAGES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the sources, with a + if they were changed since."""
    here = ["git", "-C", str(Path(codetta.__file__).parent)]
    commit = _output([*here, "rev-parse", "--short=12", "HEAD"])
    changed = commit and _output([*here, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+" if changed else commit or None


def _power_limit() -> float | None:
    found = _output(["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits"])
    numbers = _numbers(found.splitlines()[0]) if found else []
    return numbers[0] if numbers else None


def _output(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass
class Watched:
    """Medians of what nvidia-smi said; empty where there is none."""

    values: dict[str, float] = field(default_factory=dict)


@contextmanager
def watching() -> Iterator[Watched]:
    """Ask for clock, power and temperature ten times a second while the context is open."""
    found = Watched()
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        yield found
        return
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = str(device.uuid).removeprefix("GPU-")  # what CUDA calls 0 need not be what nvidia-smi calls so
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    asking = subprocess.Popen(
        [*command, f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield found
    finally:
        asking.terminate()
        said, _ = asking.communicate()
        found.values = medians(said)


def medians(lines: str) -> dict[str, float]:
    """The median of each column of nvidia-smi's answers; lines that are cut off or no numbers do not count."""
    rows = [numbers for line in lines.splitlines() if len(numbers := _numbers(line)) == len(QUERY)]
    return {name: median(column) for name, column in zip(QUERY, zip(*rows, strict=True), strict=False)}


def _numbers(line: str) -> list[float]:
    try:
        return [float(x) for x in line.split(",")]
    except ValueError:
        return []
