import pytest
from helpers.harnesses.rebalancing_model import SHAPE, Pace, by_lock, rebalance, violations

from equipoise.balancer.experts.config import ShareMode

START = ((0, 1, 2, 2, 3, 0),) * SHAPE.layers


@pytest.mark.parametrize("shares", [ShareMode.STATIC, ShareMode.LAGGED])
@pytest.mark.parametrize("immediate", [1, 2])
def test_locked_updates_rewrite_layers_and_commit_alike(shares: ShareMode, immediate: int) -> None:
    stories = rebalance(
        shares=shares, way=by_lock, pace=Pace(0.02), layer_updates_per_iter=immediate
    )
    assert violations(stories) == []
    assert stories[0].commits == stories[1].commits
    assert len(stories[0].commits) >= 2
    assert {story.observations[-1].placement for story in stories} != {START}
    assert sum(report.copies for report in stories[0].reports) > 0
