"""What ranks have is compared, whatever it is and whoever has it."""

from helpers.processes.thread_control_plane import ThreadControl, meet
from helpers.watchdog import WATCHDOG
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.agreement.same_on_all_ranks import (
    UNKNOWN_VALUE,
    check_same_on_all_ranks,
)
from equipoise.hal.errors import BallotIncomplete, RanksDiffer

names = st.sampled_from(["layout", "step"])
sides = st.dictionaries(
    st.sampled_from(["one", "other"]), st.dictionaries(names, st.sampled_from("ab")), max_size=2
)


def entries(side: dict[str, dict[str, str]]) -> dict[tuple[str, str], str]:
    return {(of, name): value for of in side for name, value in side[of].items()}


@given(st.lists(sides, min_size=1, max_size=4))
def test_check_same_names_a_difference_and_all_ranks_alike(
    each: list[dict[str, dict[str, str]]],
) -> None:
    def program(control: ThreadControl) -> object:
        own_facts = each[control.rank]
        return check_same_on_all_ranks(control, "same", WATCHDOG, own_facts, note=str(control.rank))

    answers = meet(len(each), program)
    rank_entries = [entries(side) for side in each]
    if all(side == rank_entries[0] for side in rank_entries):
        assert answers == [tuple(str(rank) for rank in range(len(each)))] * len(each)
        return
    assert {type(answer) for answer in answers} == {RanksDiffer}
    (text,) = {str(answer) for answer in answers}
    group, _, difference = text.partition(": ranks differ in ")
    name, _, ranks_by_value = difference.partition(": ")
    values = {side.get((group, name), UNKNOWN_VALUE) for side in rank_entries}
    assert len(values) > 1
    assert sorted(part.split()[-1] for part in ranks_by_value.split("; ")) == sorted(values)


def test_check_same_lists_ranks_by_value() -> None:
    def program(control: ThreadControl) -> object:
        own_facts = {"pool": {"layers": str(control.rank == 2), "experts": "8"}}
        return check_same_on_all_ranks(control, "same", WATCHDOG, own_facts)

    (text,) = {str(answer) for answer in meet(5, program)}
    assert text == "pool: ranks differ in layers: ranks 0..1, 3..4 have False; rank 2 has True"


def test_check_same_compares_given_ranks_only() -> None:
    def program(control: ThreadControl) -> object:
        if control.rank == 1:
            return None
        own_facts = {"group": {"step": "3"}}
        return check_same_on_all_ranks(control, "same", WATCHDOG, own_facts, ranks=[0, 2])

    assert meet(3, program) == [("", ""), None, ("", "")]


def test_check_same_raises_where_a_rank_does_not_come() -> None:
    def program(control: ThreadControl) -> object:
        if control.rank == 1:
            return None
        return check_same_on_all_ranks(control, "same", 0.05, {})

    first, _ = meet(2, program)
    assert type(first) is BallotIncomplete
