"""Something goes wrong with a rank while experts move: on GPUs, on NPUs of the simulated driver."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.harnesses.devices import Network
from helpers.harnesses.fault_matrix import LOSSES, TROUBLES, healthy, matrix_row, unmoved
from helpers.processes.rank_pool import Case, Ranks
from helpers.rank_programs import rebalance_faults as faults
from helpers.records import RecordProperty, add_row
from helpers.tiers import DEEP

SIZE = 3
LOST = [
    ("Staged", "killed", "staged"),
    ("Transferring", "stopped", "staged"),
    ("Updating", "killed", "in_place"),
    ("Proposed", "writes are wrong", "in_place"),
]
TROUBLED = [
    ("bytes corrupted", "Transferring", "staged"),
    ("message lost", "Proposed", "staged"),
    ("plan differs", "Updating", "in_place"),
]
"""Of the matrix, on every commit; all of it in the deep profile."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes of these tests' own, replaced after each case.

    What was under way with a lost rank keeps its stream; after 32 of them, two roles share one.
    """
    pool = Ranks()
    yield pool
    pool.close()


def play(
    ranks: Ranks,
    network: Network,
    program: Callable[..., Any],
    lost: frozenset[int],
    **arguments: str,
) -> list[Any]:
    network.need(SIZE)
    return ranks.play(
        Case(
            program=f"{program.__module__}:{program.__qualname__}",
            size=SIZE,
            arguments={**arguments, "backend": network.backend},
            deadline=faults.DEADLINE,
            lost=lost,
            spoils=True,
            communicator=network.communicator,
        )
    )


@pytest.mark.parametrize(("where", "how", "commit"), LOSSES if DEEP else LOST)
def test_engine_survivors_serve_one_layout_after_rank_loss(
    ranks: Ranks,
    network: Network,
    where: str,
    how: str,
    commit: str,
    record_property: RecordProperty,
) -> None:
    lost_ranks = frozenset({faults.VICTIM})
    answers = play(ranks, network, faults.survive, lost_ranks, where=where, how=how, commit=commit)
    healthy([answers[0], answers[2]])
    add_row(record_property, "fault matrix", matrix_row(network.backend, commit, how, where))


@pytest.mark.parametrize(("what", "where", "commit"), TROUBLES if DEEP else TROUBLED)
def test_engine_keeps_layout_on_every_rank_after_fault(
    ranks: Ranks,
    network: Network,
    what: str,
    where: str,
    commit: str,
    record_property: RecordProperty,
) -> None:
    answers = play(
        ranks, network, faults.endure, frozenset(), what=what, where=where, commit=commit
    )
    unmoved(answers, what)
    add_row(record_property, "fault matrix", matrix_row(network.backend, commit, what, where))
