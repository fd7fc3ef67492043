"""A fault strikes a rank at every transition of a rebalance; the others are left whole."""

import pytest
from helpers.harnesses.fault_matrix import LOSSES, TROUBLES, healthy, matrix_row, unmoved
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import rebalance_faults as faults
from helpers.records import RecordProperty, add_row
from helpers.tiers import DEEP

DEADLINE = faults.DEADLINE
LOST = [
    ("Staged", "killed", "staged"),
    ("Transferring", "stopped", "staged"),
    ("Decided", "killed", "staged"),
    ("Decided", "raises", "staged"),
    ("Updating", "killed", "in_place"),
    ("Proposed", "cut off", "in_place"),
    ("Proposed", "writes are wrong", "in_place"),
]
TROUBLED = [
    *((what, "Planning", "staged") for what in faults.BREAKAGES),
    ("plan differs", "Updating", "in_place"),
    ("slow", "Proposed", "in_place"),
]
"""Of the matrix, on every commit; all of it in the deep profile."""


@pytest.mark.parametrize(("where", "how", "commit"), LOSSES if DEEP else LOST)
def test_engine_survivors_serve_one_layout_after_losing_a_rank(
    ranks: Ranks, where: str, how: str, commit: str, record_property: RecordProperty
) -> None:
    lost_ranks = [faults.VICTIM]
    answers = ranks.run(
        faults.survive, 3, deadline=DEADLINE, lost=lost_ranks, where=where, how=how, commit=commit
    )
    healthy([answers[0], answers[2]])
    add_row(record_property, "fault matrix", matrix_row("processes", commit, how, where))


@pytest.mark.parametrize(("what", "where", "commit"), TROUBLES if DEEP else TROUBLED)
def test_engine_ranks_serve_one_layout_beside_a_faulty_rank(
    ranks: Ranks, what: str, where: str, commit: str, record_property: RecordProperty
) -> None:
    answers = ranks.run(faults.endure, 3, deadline=DEADLINE, what=what, where=where, commit=commit)
    unmoved(answers, what)
    add_row(record_property, "fault matrix", matrix_row("processes", commit, what, where))


def test_fault_samples_are_part_of_the_matrix() -> None:
    assert set(LOST) <= set(LOSSES)
    assert set(TROUBLED) <= set(TROUBLES)
