import pytest
from helpers.harnesses.rebalancing_model import (
    SHAPE,
    Pace,
    in_place_from_host,
    rebalance,
    violations,
)

from equipoise.balancer.experts.config import ShareMode

START = ((0, 1, 2, 2, 3, 0),) * SHAPE.layers


@pytest.mark.parametrize("shares", [ShareMode.STATIC, ShareMode.LAGGED])
@pytest.mark.parametrize("immediate", [1, 2])
def test_locked_updates_rewrite_layers_and_commit_alike(shares: ShareMode, immediate: int) -> None:
    rank_records = rebalance(
        shares=shares,
        update_path=in_place_from_host,
        pace=Pace(0.02),
        layer_updates_per_iter=immediate,
    )
    assert violations(rank_records) == []
    assert rank_records[0].commits == rank_records[1].commits
    assert len(rank_records[0].commits) >= 2
    assert {rank_record.observations[-1].placement for rank_record in rank_records} != {START}
    assert sum(report.copies for report in rank_records[0].reports) > 0
