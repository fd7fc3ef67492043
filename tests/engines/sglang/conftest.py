"""Ranks that have SGLang, which is imported once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes.engine_ranks import Play, case_runner, engine_ranks
from helpers.processes.rank_pool import Ranks

PACKAGE = "sglang_cpu"


@pytest.fixture(scope="session")
def pool() -> Iterator[Ranks]:
    """The processes."""
    yield from engine_ranks(PACKAGE)


@pytest.fixture
def play(pool: Ranks, tmp_path: Path) -> Play:
    """Run a case of the package on so many ranks; what each answers."""
    return case_runner(pool, PACKAGE, tmp_path)
