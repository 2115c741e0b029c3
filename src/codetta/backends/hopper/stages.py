"""How many stages of A and B a kernel's pipeline holds, and how much shared memory it takes: kept beside its object by
the process that compiles it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from codetta.backends.hopper import toolchain  # noqa: F401  it prepares what the next imports read

# isort: split
import quack.cache
from quack.cache import jit
from quack.gemm_sm90 import GemmSm90

STAGES, SHARED, ATTRIBUTE = ".stages", ".shared", "shared_storage"
_asked: list[str] = []  # the kernel that QuACK last looked for: the one that it then compiles
_hash, _split = jit._key_to_hash, GemmSm90._compute_stages.__func__


def kernel_file(sha: str) -> Path:
    """Where in the cache the object of a kernel is."""
    folder: Path = quack.cache.get_cache_path() / jit._compute_source_fingerprint()
    return folder / f"{sha}.o"


def stages_of(kernel: Path) -> int | None:
    """The stages of the kernel in an object file; None if it was compiled before they were kept."""
    return _number(kernel.with_suffix(STAGES))


def shared_of(kernel: Path) -> int | None:
    """The bytes of shared memory of a block of that kernel: operands, stores in flight and what the epilogue holds;
    None if it was compiled before they were kept."""
    return _number(kernel.with_suffix(SHARED))


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text(encoding="utf-8"))
    return None


def _keep(file: Path, number: int) -> None:
    """Beside the kernel's object; a cache that cannot be written keeps nothing."""
    with suppress(OSError):
        half = file.with_suffix(f"{file.suffix}.{os.getpid()}")
        half.write_text(str(number), encoding="utf-8")
        half.replace(file)


def _remembering(key: tuple[Any, ...]) -> str:
    _asked[:] = [_hash(key)]
    return _asked[0]


def _recording(cls: type, *given: Any, **named: Any) -> tuple[int, int, int]:
    """QuACK's split of the shared memory, its first number kept."""
    found: tuple[int, int, int] = _split(cls, *given, **named)
    if _asked:
        _keep(kernel_file(_asked[0]).with_suffix(STAGES), found[0])
    return found


class _Recorded:
    """In the place of a kernel's attribute: the layout of its shared memory, whose size is kept."""

    def __get__(self, gemm: Any, owner: type) -> Any:
        return None if gemm is None else gemm.__dict__.get(ATTRIBUTE)

    def __set__(self, gemm: Any, storage: Any) -> None:
        gemm.__dict__[ATTRIBUTE] = storage
        if storage is not None and _asked:
            _keep(kernel_file(_asked.pop()).with_suffix(SHARED), storage.size_in_bytes())


jit._key_to_hash = _remembering
GemmSm90._compute_stages = classmethod(_recording)
setattr(GemmSm90, ATTRIBUTE, _Recorded())
