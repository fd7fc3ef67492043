"""What a run serves, in which order, and what each engine is told."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from equipoise.balancer.experts.config import BalancerConfig, PlannerOptions, RoutingRule, ShareMode
from equipoise.balancer.experts.placement import ExpertShape, check_placement
from equipoise.balancer.experts.planning.topology import topology
from equipoise.demo.grid import Grid
from equipoise.demo.run_context import RunContext
from equipoise.demo.settings import EXPERTS, LAYERS, RunSettings, Shares, VariantName
from equipoise.demo.variant import Variant, balancer_config, first_placement, variants_of_run

ALL_SETTINGS = RunSettings(
    shares=Shares.STATIC,
    routing_rule=RoutingRule.VLLM_ROW_HASH,
    window_size=6,
    step_interval=9,
    target=0.5,
    slack=0.25,
    sigma=2.0,
    min_gain=0.5,
    survive=1,
    nodes=2,
    slots_per_message=3,
    layer_updates_per_iter=5,
    max_stalled_steps=7,
)


def run_context(settings: RunSettings) -> RunContext:
    """As much of one as a configuration takes."""
    return cast(
        RunContext,
        SimpleNamespace(settings=settings, grid=Grid(4), serving=SimpleNamespace(deadline=12.0)),
    )


def test_balancer_config_takes_every_run_setting() -> None:
    config = balancer_config(run_context(ALL_SETTINGS), Variant(VariantName.STATIC, 40))
    assert config.shares is ShareMode.STATIC
    assert config.planner == PlannerOptions(target=0.5, slack=0.25, survive=1, sigma=2.0)
    assert (config.window_size, config.step_interval, config.sub_window) == (6, 9, 3)
    assert (config.routing_rule, config.min_gain_parts) == (RoutingRule.VLLM_ROW_HASH, 1 << 15)
    assert (config.nodes, config.slots_per_message, config.max_stalled_steps) == (2, 3, 7)
    assert (config.layer_updates_per_iter, config.timeout) == (5, 12.0)


def test_balancer_config_of_default_run_has_engine_defaults() -> None:
    config = balancer_config(run_context(RunSettings()), Variant(VariantName.EXACT, 40))
    plain = BalancerConfig(
        name=config.name,
        shares=config.shares,
        window_size=config.window_size,
        step_interval=config.step_interval,
        sub_window=config.sub_window,
        timeout=config.timeout,
    )
    assert config == plain


@pytest.mark.parametrize("rule", [RoutingRule.VLLM_ROW_HASH, RoutingRule.TRTLLM_ROUND_ROBIN])
def test_run_variants_of_other_routing_rule_are_static_only(rule: RoutingRule) -> None:
    settings = RunSettings(routing_rule=rule, shares=Shares.STATIC)
    assert [variant.name for variant in variants_of_run(settings, EXPERTS)] == [
        "unbalanced",
        "static",
    ]


@pytest.mark.parametrize(
    ("requested_names", "expected_names"),
    [
        (("exact", "unbalanced"), ["unbalanced", "exact"]),
        (("lagged", "exact"), ["lagged", "exact"]),
        (("exact",), ["exact"]),
    ],
)
def test_variants_are_the_requested_ones(
    requested_names: tuple[str, ...], expected_names: list[str]
) -> None:
    settings = RunSettings(variants=tuple(VariantName(name) for name in requested_names))
    assert [variant.name for variant in variants_of_run(settings, EXPERTS)] == expected_names


@pytest.mark.parametrize(
    ("ranks", "nodes", "survive", "slots"),
    [(2, 1, 1, 64), (4, 2, 1, 64), (4, 2, 2, 64), (8, 4, 2, 72), (4, 4, 2, 96)],
)
def test_first_placement_meets_survival_requirement(
    ranks: int, nodes: int, survive: int, slots: int
) -> None:
    shape = ExpertShape(LAYERS, EXPERTS, slots, ranks)
    placement = first_placement(
        RunSettings(ranks=ranks, nodes=nodes, survive=survive, slots=slots), shape
    )
    check_placement(placement, shape)
    topology(shape, nodes, survive, None).check_survival(placement)
    lost_together = np.arange(slots) // (slots // (ranks if survive == 1 else nodes))
    for row in placement:
        homes = [np.unique(lost_together[row == expert]) for expert in range(EXPERTS)]
        assert min(map(len, homes)) >= 2
