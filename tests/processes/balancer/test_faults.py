"""Something goes wrong with a rank at every transition of an epoch; the others are left whole."""

import pytest
from helpers.harnesses.left_over import LOSSES, TROUBLES, healthy, matrix_row, unmoved
from helpers.processes.ranks import Ranks
from helpers.rank_programs import faults
from helpers.records import RecordProperty, add_row
from helpers.tiers import DEEP

DEADLINE = faults.DEADLINE
LOST = [
    ("Committing", "killed", "boundary"),
    ("Moving", "stopped", "boundary"),
    ("Decided", "killed", "boundary"),
    ("Decided", "raises", "boundary"),
    ("Updating", "killed", "locked"),
    ("Agreeing", "cut off", "locked"),
    ("Agreeing", "writes are wrong", "locked"),
]
TROUBLED = [
    *((what, "Planning", "boundary") for what in faults.BREAKAGES),
    ("plan differs", "Updating", "locked"),
    ("slow", "Agreeing", "locked"),
]
"""Of the matrix, on every commit; all of it in the deep profile."""


@pytest.mark.parametrize(("where", "how", "commit"), LOSSES if DEEP else LOST)
def test_those_who_are_left_serve_one_layout_and_go_on(
    ranks: Ranks, where: str, how: str, commit: str, record_property: RecordProperty
) -> None:
    lost = [faults.VICTIM]
    answers = ranks.run(
        faults.survive, 3, deadline=DEADLINE, lost=lost, where=where, how=how, commit=commit
    )
    healthy([answers[0], answers[2]])
    add_row(record_property, "fault matrix", matrix_row("processes", commit, how, where))


@pytest.mark.parametrize(("what", "where", "commit"), TROUBLES if DEEP else TROUBLED)
def test_beside_a_rank_with_which_something_is_wrong_all_serve_one_layout(
    ranks: Ranks, what: str, where: str, commit: str, record_property: RecordProperty
) -> None:
    answers = ranks.run(faults.endure, 3, deadline=DEADLINE, what=what, where=where, commit=commit)
    unmoved(answers, what)
    add_row(record_property, "fault matrix", matrix_row("processes", commit, what, where))


def test_the_sample_is_of_the_matrix() -> None:
    assert set(LOST) <= set(LOSSES)
    assert set(TROUBLED) <= set(TROUBLES)
