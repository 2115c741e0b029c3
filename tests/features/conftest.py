"""Dynamo looks at the gradient of what goes into a block, and PyTorch warns it; it catches a warning, not an error."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The filter for every test here."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"))
