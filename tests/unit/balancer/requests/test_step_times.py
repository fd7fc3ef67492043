"""Step times as others published them."""

import pytest

from equipoise.balancer.requests.catalogue import STEP_MODELS
from equipoise.balancer.requests.cluster import published_step_time
from equipoise.hal.errors import UsageError


def test_bfio_step_time_has_published_fixed_cost() -> None:
    step = published_step_time("bfio", 72)
    assert step.fixed == pytest.approx(4.8875e-3)
    assert step.per_token == pytest.approx(1.005e-7, rel=1e-3)
    assert step.seconds(323_000) - step.fixed == pytest.approx(32.5e-3, rel=0.01)


def test_blog_step_time_charges_mean_at_half_of_largest() -> None:
    step = published_step_time("blog", 32, 2e-7)
    assert (step.fixed, step.per_token, step.per_mean) == (0.0, 2e-7, 1e-7)


def test_dyntralb_step_time_has_published_ratio() -> None:
    step = published_step_time("dyntralb", 32)
    assert step.fixed / (step.per_token * 128) == pytest.approx(20_000 / 19.2)


def test_published_step_times_exist_for_every_model_except_share() -> None:
    for name in set(STEP_MODELS) - {"share"}:
        assert published_step_time(name, 8).seconds(1000.0) > 0
    for name in ("share", "mine"):
        with pytest.raises(UsageError, match=name):
            published_step_time(name, 8)
