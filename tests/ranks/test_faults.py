"""A rank is killed or stopped at every transition of an epoch; the others are left whole."""

from typing import Any

import pytest
from hypothesis import settings
from ranks.cases import faults
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
DEADLINE = 4.0
VICTIM = 1
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


def mixed(stories: list[dict[str, Any]], part: str) -> list[str]:
    """Steps in which ranks had other generations or layouts, or slots held what nobody promised."""
    found = []
    for first, second in zip(*(story[part] for story in stories), strict=False):
        if first[:3] != second[:3]:
            found.append(f"step {first[0]}: {first[:3]} and {second[:3]}")
        for place, (_, _, placement, held) in enumerate((first, second)):
            rank = place if part == "after" or place < VICTIM else place + 1
            promised = [row[rank * 3 : rank * 3 + 3] for row in placement]
            if held != promised:
                found.append(f"step {first[0]}: rank {rank} holds {held}, promised {promised}")
    return found


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
    stories = [answers[0], answers[2]]
    assert mixed(stories, "before") == []
    assert mixed(stories, "after") == []
    assert stories[0]["last"] == stories[1]["last"] < faults.STEPS - 1, (
        "the fault was never reached"
    )
    assert len(stories[0]["after"]) == len(stories[1]["after"]) == faults.MORE
    assert "committed" in stories[0]["epochs"], "two ranks rebalance by themselves"
    assert stories[0]["epochs"] == stories[1]["epochs"]
    for story in stories:
        assert story["lasted"] < 30 * 0.5 + 3 * DEADLINE, "somebody hung"
