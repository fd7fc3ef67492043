"""The control plane between processes: clauses C6, C8."""

from helpers.processes.ranks import Ranks
from helpers.rank_programs import agreement


def test_when_the_store_goes_everybody_who_waits_or_asks_is_told(ranks: Ranks) -> None:
    for answer in ranks.run(agreement.lose_the_store, 3, seconds=2.0)[:2]:
        assert [each["error"] for each in answer["answers"]] == ["ControlLost"] * 4
        assert answer["accused"] is None
