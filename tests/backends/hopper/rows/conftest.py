"""Kernels run in Triton's interpreter here, on the CPU; without Triton there is nothing to run."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    """Outputs are poisoned, and the interpreter rounds to bfloat16 as a GPU does."""
    from triton.runtime import interpreter

    import interpreted
    from codetta.backends.hopper import memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "empty", interpreted.poisoned)
        patch.setattr(interpreter, "_convert_float", interpreted.to_nearest)
        patch.setattr(interpreter, "_patch_lang_tensor", interpreted.patched)
        yield
