"""Ranks that have vllm-ascend, which is imported once: that takes half a minute."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.processes.rank_pool import Case, Ranks

WATCHDOG = 400.0
"""Seconds that a rank may take, and importing vllm-ascend."""
DEADLINE = 60.0

Play = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def pool() -> Iterator[Ranks]:
    """The processes."""
    ranks = Ranks("vllm_ascend_cpu.rank", patience=WATCHDOG)
    yield ranks
    ranks.close()


@pytest.fixture
def play(pool: Ranks, tmp_path: Path) -> Play:
    """Run a case of `vllm_ascend_cpu` on so many ranks; what each answers."""
    meetings = 0

    def run(program: str, size: int, **arguments: Any) -> list[Any]:
        nonlocal meetings
        meetings += 1
        return pool.play(
            Case(
                program=f"vllm_ascend_cpu.{program}",
                size=size,
                arguments={"address": f"file://{tmp_path}/meeting{meetings}", **arguments},
                deadline=DEADLINE,
                watchdog=WATCHDOG,
            )
        )

    return run
