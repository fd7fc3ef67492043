"""Engines take minutes to start: tests of this folder have a longer watchdog."""

from pathlib import Path

import pytest

WATCHDOG = 1800
"""Seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WATCHDOG))
