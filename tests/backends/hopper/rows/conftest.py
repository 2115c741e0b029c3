"""Kernels run in Triton's interpreter here, on the CPU; without Triton there is nothing to run."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    """Outputs are poisoned, and the interpreter rounds to bfloat16 as a GPU does."""
    import interpreted

    with pytest.MonkeyPatch.context() as patch:
        interpreted.as_a_gpu(patch)
        yield
