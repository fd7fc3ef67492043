"""What an engine cannot be configured to do is refused at once, and not time after time."""

from typing import Any

import numpy as np
import pytest
from helpers.harnesses.rebalancing_model import rebalance, violations
from helpers.harnesses.two_family_model import settings
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.config import (
    AT_LEAST_ONE,
    PLANNER_LIMITS,
    BalancerConfig,
    PlannerOptions,
    RoutingRule,
    ShareMode,
)
from equipoise.balancer.experts.planning.planner import plan
from equipoise.hal.errors import ConfigError, PlacementError

LOAD = np.arange(12, dtype=np.int64).reshape(2, 1, 6)


def config(**changes: Any) -> BalancerConfig:
    defaults = {"shares": ShareMode.STATIC, "window_size": 2, "step_interval": 2, "sub_window": 1}
    return BalancerConfig(**{"name": "x", **defaults, **changes})


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_engine_config_counts_are_at_least_one(name: str) -> None:
    assert getattr(config(**{name: 1}), name) == 1
    with pytest.raises(ConfigError, match=f"{name} is at least 1, got 0"):
        config(**{name: 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shares": "nonsense"},
            "shares must be one of static, lagged, local, node, exact, got 'nonsense'",
        ),
        ({"routing_rule": "fair"}, "routing_rule must be one of .*, got 'fair'"),
        ({"min_gain": float("nan")}, "min_gain is at least 0, got nan"),
        ({"slots_per_message": 2.5}, "slots_per_message is a whole number, got 2.5"),
        ({"max_stalled_steps": True}, "max_stalled_steps is a whole number, got True"),
        *(
            ({"timeout": d}, "timeout must be seconds above 0")
            for d in (0, -1.0, float("nan"), float("inf"))
        ),
        ({"timeout": "x"}, "timeout must be a number, got 'x'"),
        ({"min_gain": "x"}, "min_gain must be a number, got 'x'"),
        ({"name": None}, "name must be of type str, got None"),
        ({"log_balancedness": "no"}, "log_balancedness must be of type bool, got 'no'"),
        ({"planner": {"target": 0.1}}, "planner must be of type PlannerOptions, got {'target'"),
    ],
)
def test_engine_config_refuses_bad_values_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"target": "0.1"}, {"survive": 1.5}, {"sigma": True}])
def test_planner_options_refuse_other_types_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))} must be a "):
        PlannerOptions(**options)


def test_engine_config_accepts_names_of_share_mode_and_rule() -> None:
    parsed = config(shares="static", routing_rule="vllm")
    assert parsed.shares is ShareMode.STATIC
    assert parsed.routing_rule is RoutingRule.VLLM_ROW_HASH


def test_engine_config_refuses_negative_min_gain() -> None:
    assert config(min_gain=0).min_gain == 0
    with pytest.raises(ConfigError, match="min_gain is at least 0, got -1"):
        config(min_gain=-1)


@given(
    name=st.sampled_from(sorted(PLANNER_LIMITS)),
    value=st.floats(-2.0, 2000.0) | st.just(float("nan")),
)
def test_aims_are_refused_exactly_when_planner_refuses(name: str, value: float) -> None:
    """Two slots an expert on two nodes of two ranks: any survival is possible."""
    whole = name in ("survive", "headroom")
    limit = int(value) if whole and value == value else value
    try:
        plan(LOAD, slots=12, ranks=4, nodes=2, **{name: limit})  # type: ignore[arg-type]
    except PlacementError:
        with pytest.raises(ConfigError, match=f"{name} must be 0 to {PLANNER_LIMITS[name]}, got"):
            PlannerOptions(**{name: limit})  # type: ignore[arg-type]
    else:
        assert getattr(PlannerOptions(**{name: limit}), name) == limit  # type: ignore[arg-type]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(-3, 30))
def test_engine_config_phase_is_multiple_of_sub_window_below_interval(
    sub_window: int, windows: int, phase: int
) -> None:
    interval = sub_window * windows
    schedule = {"window_size": sub_window, "sub_window": sub_window, "step_interval": interval}
    if phase in range(0, interval, sub_window):
        assert settings(**schedule, step_offset=phase).step_offset == phase
        return
    with pytest.raises(ConfigError, match=f"step_offset {phase} must be a multiple of sub_window"):
        settings(**schedule, step_offset=phase)


@pytest.mark.parametrize("phase", [0, 2, 4])
def test_rebalances_open_one_step_after_offset(phase: int) -> None:
    rank_records = rebalance(step_interval=6, step_offset=phase)
    assert violations(rank_records) == []
    opening_steps = [report.opened_at for report in rank_records[0].reports]
    assert opening_steps
    assert {(step - 1) % 6 for step in opening_steps} == {phase}
    numbers = [report.number for report in rank_records[0].reports]
    assert len(set(numbers)) == len(numbers)
