"""Ranks that have an engine, which is imported once, and cases for them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers.processes.rank_pool import Case, Ranks

WATCHDOG = 400.0
"""Seconds that a rank may take, and importing the engine."""
DEADLINE = 60.0

Play = Callable[..., list[Any]]


def engine_ranks(package: str) -> Iterator[Ranks]:
    """The processes of a simulator's package, until the iterator goes on."""
    ranks = Ranks(f"{package}.rank", patience=WATCHDOG)
    yield ranks
    ranks.close()


def case_runner(ranks: Ranks, package: str, folder: Path) -> Play:
    """Returns what runs a case of the package on so many ranks, and returns their answers.

    Ranks meet at files in `folder`.
    """
    meetings = 0

    def run(program: str, size: int, **arguments: Any) -> list[Any]:
        nonlocal meetings
        meetings += 1
        return ranks.play(
            Case(
                program=f"{package}.{program}",
                size=size,
                arguments={"address": f"file://{folder}/meeting{meetings}", **arguments},
                deadline=DEADLINE,
                watchdog=WATCHDOG,
            )
        )

    return run
