"""The diagnosis of a machine: versions, devices, and what can run here."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

import codetta
from codetta.backends import BACKENDS

# What codetta runs on, and the extra that asks for it; what it asks for is in the package's own metadata.
PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
    "triton",
    "matplotlib",
)


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution: the installed version (None: absent), what codetta asks for, the extra that asks, and what is
    wrong with what is there."""

    name: str
    version: str | None
    wanted: str
    extra: str
    problem: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: its name and compute capability."""

    name: str
    capability: str


@dataclass(frozen=True, slots=True)
class Target:
    """Something that can run a plan or a graph: whether it does here, and why, or why not."""

    name: str
    runs: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What ``codetta doctor`` prints."""

    codetta: str
    python: str
    system: str
    cores: int
    packages: tuple[Package, ...]
    gpus: tuple[Device, ...]
    no_gpu: str
    targets: tuple[Target, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def __rich__(self) -> RenderableType:
        packages = Table("package", "version", "codetta asks for", "extra", "", box=None, pad_edge=False)
        for p in self.packages:
            packages.add_row(
                p.name, p.version or "absent", p.wanted or "any", p.extra, f"[red]{escape(p.problem)}[/red]"
            )
        targets = Table("runs", "what", "why", box=None, pad_edge=False)
        for t in self.targets:
            targets.add_row("[green]yes[/green]" if t.runs else "[red]no[/red]", t.name, escape(t.reason))
        devices = [f"GPU: {d.name}, capability {d.capability}" for d in self.gpus] or [f"no GPU: {self.no_gpu}"]
        head = f"codetta {self.codetta} on Python {self.python}, {self.system}, {self.cores} cores"
        return Group(head, *devices, "", packages, "", targets)


def diagnose() -> Diagnosis:
    """Look at this machine."""
    gpus, no_gpu = _gpus()
    return Diagnosis(
        codetta=codetta.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        packages=tuple(_package(name) for name in PACKAGES),
        gpus=gpus,
        no_gpu=no_gpu,
        targets=tuple(_targets(gpus)),
    )


def why_not_version(version: str, wanted: str) -> str | None:
    """The reason a version is none of those wanted (``>=2.11,<2.15``), or None."""
    ask = {
        "==": lambda a, b: a == b,
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
    }
    for term in filter(None, (t.strip() for t in wanted.split(","))):
        match = re.fullmatch(r"(==|>=|<=|<|>)\s*([\w.]+)", term)
        if match is not None and not ask[match[1]](_key(version), _key(match[2])):
            return f"{version} is not {term}"
    return None


def _key(version: str) -> tuple[int, ...]:
    """A version's numbers: ``2.13.0+cpu`` is (2, 13, 0); ``.post2`` and the like are the fourth."""
    public = version.partition("+")[0]
    numbers = [int(n) for n in re.findall(r"\d+", public)][:4]
    return tuple(numbers + [0] * (4 - len(numbers)))


def _package(name: str) -> Package:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    wanted, extra = _requirement(name)
    return Package(name, version, wanted, extra, (why_not_version(version, wanted) or "") if version else "")


def _requirement(name: str) -> tuple[str, str]:
    """The version that codetta's metadata asks of a distribution and the extra that asks; the first that says one."""
    found: list[tuple[str, str]] = []
    try:
        lines = metadata.requires("codetta") or []
    except metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        match = re.match(r"([\w.-]+)(\[[^]]*\])?\s*(.*)", requirement.strip())
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if match is not None and match[1].replace("_", "-").lower() == name:
            found.append((match[3].strip(" ()"), extra[1] if extra else ""))
    users = [f for f in found if f[1] != "dev"] or found
    return next((f for f in users if f[0]), users[0] if users else ("", ""))


def _gpus() -> tuple[tuple[Device, ...], str]:
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return tuple(Device(p.name, f"{p.major}.{p.minor}") for p in properties), ""
    if torch.version.cuda is None:
        return (), f"PyTorch {torch.__version__} is built without CUDA"
    return (), "PyTorch sees no CUDA device: no GPU, no driver, or it is hidden from this process"


def _targets(gpus: Iterable[Device]) -> Iterable[Target]:
    yield Target("reference backend", True, "plain PyTorch, on the CPU by default; it defines what every program means")
    if "hopper" not in BACKENDS:
        missing = "kernels for Hopper GPUs are not part of this version; installing codetta[hopper] does not add them"
        yield Target("hopper backend", False, missing)
    if gpus:
        reason = "models on the GPU: the original graph goes to Inductor, since codetta has no kernels for it yet"
        yield Target("Inductor on the GPU", True, reason)
    have = _package("transformers").version is not None
    presets = "transformers is installed" if have else "pip install 'codetta[hf]'"
    yield Target("presets and Hugging Face configurations", have, presets)
    plots = _package("matplotlib").version is not None
    yield Target("the demo's picture", plots, "matplotlib is installed" if plots else "pip install 'codetta[bench]'")
