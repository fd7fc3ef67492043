"""The kernels are compiled where there is a device, and interpreted where there is none."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.interpreting import interpret_without_device

interpret_without_device()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """All of them are worth running on a device: `pytest -m cuda`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cuda")
