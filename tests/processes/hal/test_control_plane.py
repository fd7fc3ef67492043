"""The control plane between processes: clauses C6, C8."""

from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import control_plane as agreement


def test_control_plane_raises_control_plane_lost_when_store_goes(ranks: Ranks) -> None:
    for answer in ranks.run(agreement.lose_the_store, 3, seconds=2.0)[:2]:
        assert [each["error"] for each in answer["answers"]] == ["ControlPlaneLost"] * 4
        assert answer["accused"] is None
