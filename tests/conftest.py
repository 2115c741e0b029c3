"""What all tests share: the verifier runs between all passes, GPU tests are skipped where there is no GPU."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _every_pass_is_verified() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODETTA_VERIFY_IR", "1")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # only here: tests that need nothing should not wait for it

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
