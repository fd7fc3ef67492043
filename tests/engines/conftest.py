"""Engines take minutes to start: tests of this folder have a longer watchdog, and share starts."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

WATCHDOG = 1800
"""Seconds."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(WATCHDOG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`, one process has all tests that start vLLM, and makes models and reference once.

    The other imports vLLM for the tests that call it, and forks vllm-ascend's ranks. Marks for
    `--dist loadgroup` would say the same; xdist 3.8 loses them under pytest 9.2. With `--dist`, as
    the deep tier has it, tests are distributed as that says.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def starts_vllm(file: str) -> bool:
        return "run_once" in Path(config.rootpath, file).read_text(encoding="utf-8")

    class Halves(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return "starts" if starts_vllm(nodeid.partition("::")[0]) else "calls"

    return Halves(config, log)
