"""Whether the kernels can run here, and if not, why and what to do. Loads none of the packages that it asks about."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

INSTALL = "pip install 'codetta[hopper]'"
CAPABILITY = 9  # of H100, H200, H20, GH200: the mainloop is written for it, in instructions that no other GPU has


@dataclass(frozen=True, slots=True)
class Pin:
    """A distribution that the kernels need: the versions that will do, and the module it brings."""

    name: str
    versions: str
    module: str


# The extra `hopper` of pyproject.toml, which says why each of them; a test compares the two. Written down here because
# metadata of ours exists only where codetta is installed, and it also runs from a source tree.
PINS = (
    Pin("quack-kernels", "==0.6.5", "quack"),
    Pin("nvidia-cutlass-dsl", "==4.8.1", "cutlass"),
    Pin("apache-tvm-ffi", "==0.1.15.post2", "tvm_ffi"),
    Pin("torch-c-dlpack-ext", "==0.1.5", "torch_c_dlpack_ext"),
    Pin("cloudpickle", ">=3.1", "cloudpickle"),
    Pin("triton", "", "triton"),
)

# The extra `flash`: attention where there is a path for it without a mask; without it, PyTorch's own.
FLASH = Pin("flash-attn-4", "==4.0.0b36", "flash_attn")


def why_not(device: torch.device | int | None = None) -> str | None:
    """The reason why kernels cannot run on a device (by default the current one), and what to do; None if they can."""
    if not torch.cuda.is_available():
        return no_device()
    index = device.index if isinstance(device, torch.device) else device
    if isinstance(device, torch.device) and device.type != "cuda":
        return f"the device is {device}, and kernels run on GPUs"
    return _why_not_on(torch.cuda.current_device() if index is None else index)


def no_device() -> str:
    """The reason why there is no GPU."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    return "PyTorch sees no CUDA device: no GPU, no driver, or it is hidden from this process"


@cache
def _why_not_on(index: int) -> str | None:
    found = torch.cuda.get_device_properties(index)
    if found.major != CAPABILITY:
        capability = f"compute capability {found.major}.{found.minor}"
        return f"{found.name} has {capability}; there are kernels for {CAPABILITY}.0 (Hopper: H100, H200) only"
    return why_not_installed()


@cache
def why_not_installed() -> str | None:
    """The reason why the kernels' packages are not what they must be, all that is wrong at once; None if they are."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the kernels' packages exist for Linux on x86-64, and this is {platform.system()} {platform.machine()}"
    wrong = [reason for reason in map(_why_not_pin, PINS) if reason is not None]
    return f"{'; '.join(wrong)}: {INSTALL}" if wrong else _why_not_layout()


@cache
def why_not_flash() -> str | None:
    """The reason why FlashAttention is not what it must be; None if it is."""
    reason = _why_not_pin(FLASH)
    return None if reason is None else f"{reason}: pip install 'codetta[flash]'"


def _why_not_pin(pin: Pin) -> str | None:
    try:
        version = metadata.version(pin.name)
    except metadata.PackageNotFoundError:
        return f"{pin.name} is not installed"
    reason = why_not_version(version, pin.versions)
    if reason is not None:
        return f"{pin.name} {reason}"
    return None if importlib.util.find_spec(pin.module) else f"{pin.name} is installed, but there is no {pin.module}"


def _why_not_layout() -> str | None:
    """QuACK tells CuTe's functions from an author's by the path alone (gemm_runtime/identity.py, _is_extern_function),
    and fails when it is imported from anywhere else."""
    spec = importlib.util.find_spec("cutlass")
    parts = Path(spec.origin).parts if spec is not None and spec.origin is not None else ()
    if {"site-packages", "dist-packages"}.isdisjoint(parts):
        where = "no folder of its path is called site-packages, which QuACK goes by"
        return f"nvidia-cutlass-dsl lies in {Path(*parts[:-1])}; {where}: install into such a folder"
    return None


def why_not_version(version: str, wanted: str) -> str | None:
    """The reason a version is none of those wanted (``>=2.11,<2.15``), or None."""
    ask = {
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
    }
    for term in filter(None, (t.strip() for t in wanted.split(","))):
        match = re.fullmatch(r"(==|!=|>=|<=|<|>|~=)\s*([\w.]+?)(\.\*)?", term)
        if match is None:
            continue
        sign, asked, any_below = match.groups()
        have, want = _key(version), _key(asked)
        if sign == "~=" or any_below:
            digits = asked.count(".") + (1 if any_below else 0)
            fits = have[:digits] == want[:digits] and (any_below is not None or have >= want)
            fits = not fits if sign == "!=" else fits
        else:
            fits = ask[sign](have, want)
        if not fits:
            return f"{version} is not {term}"
    return None


def _key(version: str) -> tuple[int, ...]:
    """A version's numbers: ``2.13.0+cpu`` is (2, 13, 0); ``.post2`` and the like are the fourth."""
    public = version.partition("+")[0]
    numbers = [int(n) for n in re.findall(r"\d+", public)][:4]
    return tuple(numbers + [0] * (4 - len(numbers)))
