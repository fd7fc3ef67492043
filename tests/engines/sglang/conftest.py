"""Ranks that have SGLang, which is imported once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.processes.rank_pool import Case, Ranks

WATCHDOG = 400.0
"""Seconds that a rank may take, and importing SGLang."""
DEADLINE = 60.0

Play = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def pool() -> Iterator[Ranks]:
    """The processes."""
    ranks = Ranks("sglang_cpu.rank", patience=WATCHDOG)
    yield ranks
    ranks.close()


@pytest.fixture
def play(pool: Ranks, tmp_path: Path) -> Play:
    """Run a case of `sglang_cpu` on so many ranks; what each answers."""
    meetings = 0

    def run(program: str, size: int, **arguments: Any) -> list[Any]:
        nonlocal meetings
        meetings += 1
        return pool.play(
            Case(
                program=f"sglang_cpu.{program}",
                size=size,
                arguments={"address": f"file://{tmp_path}/meeting{meetings}", **arguments},
                deadline=DEADLINE,
                watchdog=WATCHDOG,
            )
        )

    return run
