"""What the call of a Python function in a graph carries, so that AOTAutograd's cache takes the graph: without it, every
process traces the graph anew, which takes as long as all else together where caches are full."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

import codetta

ROOT = Path(codetta.__file__).parent


def cacheable(*facts: object) -> dict[str, object]:
    """For a node's ``meta``. What such a function traces to hangs on our source, on its arguments, which the cache
    reads itself, and on the ``facts``."""
    return {"is_wrapped": True, "user_cache_hash": sha256(f"{_sources()} {facts}".encode()).hexdigest()}


@cache
def _sources() -> str:
    """A digest of the package."""
    found = sha256()
    for file in sorted(ROOT.rglob("*.py")):
        found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()
