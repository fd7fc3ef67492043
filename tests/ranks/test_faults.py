"""A rank is killed or stopped at every transition of an epoch; the others are left whole."""

import pytest
from hypothesis import settings
from ranks.cases import faults
from support.left_over import VICTIM, healthy, unmoved
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
DEADLINE = 8.0
MATRIX = [
    *((where, how, "boundary")
      for where in ("Planning", "Agreeing", "Moving", "Committing", "Decided")
      for how in ("killed", "stopped")),
    *((where, how, "locked")
      for where in ("Planning", "Agreeing", "Decided", "Updating")
      for how in ("killed", "stopped")),
]  # fmt: skip
SAMPLE = [
    ("Committing", "killed", "boundary"),
    ("Moving", "stopped", "boundary"),
    ("Decided", "killed", "boundary"),
    ("Updating", "killed", "locked"),
]
"""Of the matrix, on every commit; all of it in the deep profile."""
DEEP = settings.get_current_profile_name() == "deep"


@pytest.mark.parametrize(("where", "how", "commit"), MATRIX if DEEP else SAMPLE)
def test_those_who_are_left_serve_one_layout_and_go_on(
    ranks: Ranks, where: str, how: str, commit: str
) -> None:
    answers = ranks.run(
        faults.survive,
        3,
        deadline=DEADLINE,
        lost=[VICTIM],
        where=where,
        how=how,
        commit=commit,
        victim=VICTIM,
    )
    healthy([answers[0], answers[2]])


@pytest.mark.parametrize("what", faults.BREAKAGES)
def test_beside_a_rank_with_which_something_is_wrong_all_serve_one_layout(
    ranks: Ranks, what: str
) -> None:
    unmoved(ranks.run(faults.endure, 3, deadline=DEADLINE, what=what), what)
