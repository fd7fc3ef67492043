"""Ranks are killed and stopped while experts move, on NPUs of the simulated driver."""

import pytest
from hypothesis import settings
from ranks.cases import faults
from support.left_over import VICTIM, healthy, unmoved
from support.ranks import Case, Ranks

pytestmark = pytest.mark.npusim
MATRIX = [
    (where, how, commit)
    for commit, states in (
        ("boundary", ("Planning", "Agreeing", "Moving", "Committing", "Decided")),
        ("locked", ("Planning", "Agreeing", "Decided", "Updating")),
    )
    for where in states
    for how in ("killed", "stopped")
]
SAMPLE = [
    ("Committing", "killed", "boundary"),
    ("Moving", "stopped", "boundary"),
    ("Updating", "killed", "locked"),
]
"""Of the matrix, on every commit; all of it in the deep profile."""
DEEP = settings.get_current_profile_name() == "deep"
BROKEN = tuple(faults.BREAKAGES) if DEEP else ("bytes corrupted", "message lost")


@pytest.mark.parametrize(("where", "how", "commit"), MATRIX if DEEP else SAMPLE)
def test_npus_that_are_left_serve_one_layout_and_go_on(
    ranks: Ranks, where: str, how: str, commit: str
) -> None:
    arguments = {
        "where": where,
        "how": how,
        "commit": commit,
        "victim": VICTIM,
        "backend": "ascend",
    }
    answers = ranks.play(
        Case(
            program=f"{faults.survive.__module__}:{faults.survive.__qualname__}",
            size=3,
            arguments=arguments,
            deadline=8.0,
            lost=frozenset({VICTIM}),
            communicator="equipoise.backends.ascend:HCCL",
        )
    )
    healthy([answers[0], answers[2]])


@pytest.mark.parametrize("what", BROKEN)
def test_beside_an_npu_with_which_something_is_wrong_all_serve_one_layout(
    ranks: Ranks, what: str
) -> None:
    answers = ranks.play(
        Case(
            program=f"{faults.endure.__module__}:{faults.endure.__qualname__}",
            size=3,
            arguments={"what": what, "backend": "ascend"},
            deadline=8.0,
            communicator="equipoise.backends.ascend:HCCL",
        )
    )
    unmoved(answers, what)
