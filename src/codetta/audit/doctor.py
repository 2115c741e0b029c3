"""The diagnosis of a machine: versions, devices, and what can run here."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

import codetta
from codetta import settings
from codetta.backends.hopper.support import (
    FLASH,
    PINS,
    no_device,
    why_not,
    why_not_flash,
    why_not_installed,
    why_not_version,
)
from codetta.backends.hopper.table import tables
from codetta.errors import SettingsError

# What codetta runs on, and the extra that asks for it; what it asks for is in the package's own metadata.
PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
    "cloudpickle",
    "triton",
    "flash-attn-4",
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
    """A GPU: its name and compute capability, and why kernels do not run there (empty: they do)."""

    name: str
    capability: str
    why_not: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """An installed package (vLLM, FlashInfer, ...) whose own metadata does not allow the version that kernels need."""

    package: str
    asks_for: str
    kernels_need: str


@dataclass(frozen=True, slots=True)
class Cache:
    """Where compiled kernels are kept, and how much there is."""

    path: str
    files: int
    bytes: int


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
    conflicts: tuple[Conflict, ...]
    cache: Cache
    tuned: tuple[str, ...]
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
        conflicts = [
            f"[red]{escape(c.package)} asks for {escape(c.asks_for)}, the kernels need {escape(c.kernels_need)}[/red]"
            for c in self.conflicts
        ]
        cache = f"kernel cache: {escape(self.cache.path)}, {self.cache.files} files, {self.cache.bytes / 1e6:.1f} MB"
        targets = Table("runs", "what", "why", box=None, pad_edge=False)
        for t in self.targets:
            targets.add_row("[green]yes[/green]" if t.runs else "[red]no[/red]", t.name, escape(t.reason))
        devices = [_line(d) for d in self.gpus] or [f"no GPU: {self.no_gpu}"]
        head = f"codetta {self.codetta} on Python {self.python}, {self.system}, {self.cores} cores"
        tuned = [escape(f"tuned configurations: {line}") for line in self.tuned]
        return Group(head, *devices, cache, *tuned, "", packages, *conflicts, "", targets)


def _line(d: Device) -> str:
    runs = f"no kernels: {d.why_not}" if d.why_not else "kernels run"
    return escape(f"GPU: {d.name}, capability {d.capability}, {runs}")


def diagnose() -> Diagnosis:
    """Look at this machine."""
    gpus, no_gpu = _gpus()
    return Diagnosis(
        codetta=codetta.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        packages=tuple(_package(name) for name in PACKAGES),
        conflicts=tuple(_conflicts()),
        cache=_cache(),
        tuned=tuple(_tuned()),
        gpus=gpus,
        no_gpu=no_gpu,
        targets=tuple(_targets(gpus)),
    )


def _package(name: str) -> Package:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    wanted, extra = _requirement(name)
    return Package(name, version, wanted, extra, (why_not_version(version, wanted) or "") if version else "")


def _requirement(name: str) -> tuple[str, str]:
    """The version that codetta's metadata asks of a distribution and the extra that asks; the first that says one."""
    try:
        lines = metadata.requires("codetta") or []
    except metadata.PackageNotFoundError:  # a source tree
        pins = [*((p, "hopper") for p in PINS), (FLASH, "flash")]
        lines = [f"{p.name}{p.versions}; extra == '{extra}'" for p, extra in pins]
    found = [(versions, extra) for asked, versions, extra in map(_parsed, lines) if asked == name]
    users = [f for f in found if f[1] != "dev"] or found
    return next((f for f in users if f[0]), users[0] if users else ("", ""))


def _parsed(line: str) -> tuple[str, str, str]:
    """A line of a distribution's requirements: name, versions, extra."""
    requirement, _, marker = line.partition(";")
    match = re.match(r"([\w.-]+)\s*(\[[^]]*\])?\s*(.*)", requirement.strip())
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
    name, versions = (match[1], match[3].strip(" ()")) if match is not None else ("", "")
    return re.sub(r"[-_.]+", "-", name).lower(), versions, extra[1] if extra else ""


def _conflicts() -> Iterable[Conflict]:
    """What other installed packages ask of the pinned ones and the pins do not satisfy."""
    pinned = {p.name: p.versions.removeprefix("==") for p in PINS if p.versions.startswith("==")}
    for other in sorted(metadata.distributions(), key=lambda d: str(d.name).lower()):
        for name, versions, extra in map(_parsed, other.requires or ()):
            if name in pinned and not extra and why_not_version(pinned[name], versions) is not None:
                yield Conflict(f"{other.name} {other.version}", f"{name}{versions}", f"{name}=={pinned[name]}")


def _cache() -> Cache:
    folder = settings.cache_dir()
    sizes = [f.stat().st_size for f in folder.rglob("*") if f.is_file()]
    return Cache(str(folder), len(sizes), sum(sizes))


def _tuned() -> Iterable[str]:
    """The tables that serve this GPU (one that is assumed, where there is none), the user's own first."""
    try:
        for t in tables():
            yield f"{len(t.entries)} measured on {t.gpu}, {t.path}"
    except SettingsError as error:
        yield str(error)


def _gpus() -> tuple[tuple[Device, ...], str]:
    if not torch.cuda.is_available():
        return (), no_device()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Device(p.name, f"{p.major}.{p.minor}", why_not(i) or "") for i, p in enumerate(properties)), ""


def _targets(gpus: Sequence[Device]) -> Iterable[Target]:
    yield Target("reference backend", True, "plain PyTorch, on the CPU by default; it defines what every program means")
    runs = [d.name for d in gpus if not d.why_not]
    reasons = list(dict.fromkeys(d.why_not for d in gpus if d.why_not)) or [no_device()]
    if not gpus and (missing := why_not_installed()) is not None:
        reasons.append(missing)
    yield Target("hopper backend", bool(runs), f"kernels on {', '.join(runs)}" if runs else "; ".join(reasons))
    flash = why_not_flash()
    yield Target("attention by FlashAttention", bool(runs) and flash is None, flash or "where kernels run")
    others = list(dict.fromkeys(d.name for d in gpus if d.why_not))
    if others:
        reason = f"models on {', '.join(others)}: the original graph goes to Inductor, since kernels do not run there"
        yield Target("Inductor on the GPU", True, reason)
    have = _package("transformers").version is not None
    presets = "transformers is installed" if have else "pip install 'codetta[hf]'"
    yield Target("presets and Hugging Face configurations", have, presets)
    plots = _package("matplotlib").version is not None
    yield Target("the demo's picture", plots, "matplotlib is installed" if plots else "pip install 'codetta[bench]'")
