"""Configuration of our balancer in vLLM: cadence, planner options and staging.

This module does not import vLLM, so that benchmarks and tests can compute what a worker gets.
"""

from collections.abc import Sequence
from typing import Any

from equipoise.balancer.experts.config import (
    BalancerConfig,
    PlannerOptions,
    ShareMode,
    default_sub_window,
)
from equipoise.balancer.experts.weights.expert_weights import LayerGroup
from equipoise.integrations.vllm.settings import EplbSettings

DEFAULT_LAYER_UPDATES = 2
"""Layers that are rewritten in a step, with `commit` `in_place`."""


def balancer_config(
    settings: EplbSettings, eplb_config: Any, number: int, ranks_sharing_rows: int, nodes: int
) -> BalancerConfig:
    """Return the balancer's configuration; the cadence is that of vLLM's `EPLBConfig`.

    Args:
        settings: of `eplb`.
        eplb_config: vLLM's `EPLBConfig`.
        number: of the model, in the order of loading.
        ranks_sharing_rows: see `BalancerConfig`.
        nodes: see `BalancerConfig`.
    """
    window = min(eplb_config.window_size, eplb_config.step_interval)
    sub_window = settings.sub_window or default_sub_window(window, eplb_config.step_interval)
    return BalancerConfig(
        name=f"vllm{number}",
        shares=None if settings.shares is None else ShareMode(settings.shares),
        window_size=max(window // sub_window, 1) * sub_window,
        step_interval=eplb_config.step_interval,
        sub_window=sub_window,
        planner=PlannerOptions(target=settings.target, headroom=settings.headroom),
        min_gain=settings.min_gain,
        layer_updates_per_iter=settings.layer_updates_per_iter or DEFAULT_LAYER_UPDATES,
        nodes=nodes,
        ranks_sharing_rows=ranks_sharing_rows,
        max_stalled_steps=settings.max_stalled_steps,
        log_balancedness=eplb_config.log_balancedness,
        log_balancedness_interval=eplb_config.log_balancedness_interval,
        timeout=settings.timeout,
    )


def staging_budget(settings: EplbSettings, groups: Sequence[LayerGroup]) -> int:
    """Return the bytes of staging on a rank, for all layer groups of a model.

    That is the configured size, but at least one slot per layer group; by default one layer of each
    group. Nothing is staged with `commit` `in_place`.
    """
    if settings.commit == "in_place":
        return 0
    if settings.staging_bytes is None:
        return sum(group.nbytes // len(group.layers) for group in groups)
    minimum = sum(group.slot_bytes for group in groups)
    return max(settings.staging_bytes, minimum)


def node_count(node_of_rank: Sequence[int]) -> int:
    """Return the number of nodes if each has equally many consecutive ranks, else 1.

    Args:
        node_of_rank: the node of each rank, numbered by first occurrence.
    """
    nodes = max(node_of_rank) + 1
    ranks_per_node, remainder = divmod(len(node_of_rank), nodes)
    even = [rank // ranks_per_node for rank in range(len(node_of_rank))] if not remainder else []
    return nodes if list(node_of_rank) == even else 1
