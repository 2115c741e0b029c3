"""What a compiled kernel uses: registers, stack and spills, read off the GPU code inside its object file."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

from codetta.errors import UnsupportedError

EM_CUDA = 190  # the ELF machine number of GPU code
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"  # Triton brings NVIDIA's binary tools


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers per thread, bytes of stack per thread, and the number of spill stores and loads in the code."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> bool:
        """Whether anything is kept in local memory."""
        return bool(self.stack or self.spill_stores or self.spill_loads)


def resources(path: Path) -> Resources:
    """The resources of the kernel in an object file; UnsupportedError if it holds none."""
    found = [_of_cubin(c) for c in cubins(path.read_bytes())]
    if not found:
        raise UnsupportedError(f"{path} holds no GPU code", hint="remove it from the kernel cache")
    return max(found, key=lambda r: (r.spill_stores, r.stack, r.registers))


def cubins(data: bytes) -> Iterator[bytes]:
    """The GPU code objects embedded in a host object file."""
    for match in re.finditer(b"\x7fELF", data):
        start = match.start()

        def field(offset: int, size: int, start: int = start) -> int:
            return int.from_bytes(data[start + offset : start + offset + size], "little")

        if field(18, 2) == EM_CUDA:
            headers = field(40, 8) + field(60, 2) * field(58, 2), field(32, 8) + field(56, 2) * field(54, 2)
            yield data[start : start + max(headers)]


def _of_cubin(code: bytes) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    registers, stack = (max(map(int, re.findall(rf"{name}:(\d+)", usage)), default=0) for name in ("REG", "STACK"))
    stores, loads = (len(re.findall(rf"\b{op}\b", listing)) for op in ("STL", "LDL"))
    return Resources(registers, stack, stores, loads)


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
