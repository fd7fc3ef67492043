"""The control plane between processes: clauses C2, C3, C6, C8."""

import pytest
from helpers.processes.ranks import Ranks
from helpers.rank_programs import agreement


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_learn_the_same_winner_of_every_decision(ranks: Ranks, size: int) -> None:
    answers = ranks.run(agreement.settle, size, questions=20)
    told = {text for answer in answers for text in answer}
    assert len(told) == 1
    won = [bytes.fromhex(value) for value in told.pop().split(",")]
    assert [value[1] for value in won] == list(range(20))
    assert all(value[0] < size for value in won)


def test_when_the_store_goes_everybody_who_waits_or_asks_is_told(ranks: Ranks) -> None:
    for answer in ranks.run(agreement.lose_the_store, 3, seconds=2.0)[:2]:
        assert [each["error"] for each in answer["answers"]] == ["ControlLost"] * 4
        assert answer["accused"] is None
