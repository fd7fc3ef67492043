"""How the vLLM part configures our engine: cadence, planner options, staging.

In a module without vLLM, so that a benchmark and a test can ask for what a worker gets.
"""

from collections.abc import Sequence
from typing import Any

from equipoise.balancer.experts.config import (
    BalancerConfig,
    PlannerOptions,
    ShareMode,
    default_sub_window,
)
from equipoise.balancer.experts.placement import SHARE_ONE
from equipoise.balancer.experts.weights.expert_weights import LayerGroup
from equipoise.integrations.vllm.settings import EplbSettings

MIB = 1 << 20


def balancer_config(
    settings: EplbSettings, engine: Any, number: int, rows_alike: int, nodes: int
) -> BalancerConfig:
    """In the words of vLLM's `EPLBConfig`, where it has them.

    Args:
        settings: of the part.
        engine: vLLM's `EPLBConfig`.
        number: of the model, in the order in which they come.
        rows_alike: see `BalancerConfig`.
        nodes: see `BalancerConfig`.
    """
    window = min(engine.window_size, engine.step_interval)
    sub_window = settings.sub_window or default_sub_window(window, engine.step_interval)
    return BalancerConfig(
        name=f"vllm{number}",
        shares=ShareMode(settings.shares),
        window_size=max(window // sub_window, 1) * sub_window,
        step_interval=engine.step_interval,
        sub_window=sub_window,
        planner=PlannerOptions(target=settings.target),
        min_gain=round(settings.gain * SHARE_ONE),
        nodes=nodes,
        ranks_sharing_rows=rows_alike,
        log_balancedness=engine.log_balancedness,
        log_balancedness_interval=engine.log_balancedness_interval,
        timeout=settings.deadline,
    )


def staging_budget(settings: EplbSettings, families: Sequence[LayerGroup]) -> int:
    """Bytes of staging on a rank, over all families of a model.

    As many as the settings ask for, but a slot of each family at least; where they ask for nothing,
    a layer of each family.
    """
    if settings.staging_mb is None:
        return sum(family.nbytes // len(family.layers) for family in families)
    least = sum(family.slot_bytes for family in families)
    return max(int(settings.staging_mb * MIB), least)


def node_count(nodes_of_ranks: Sequence[int]) -> int:
    """Nodes that ranks divide among evenly, neighbours together; 1 where they do not.

    Args:
        nodes_of_ranks: the node of each rank, numbered as they first come.
    """
    nodes = max(nodes_of_ranks) + 1
    each, rest = divmod(len(nodes_of_ranks), nodes)
    even = [rank // each for rank in range(len(nodes_of_ranks))] if not rest else []
    return nodes if list(nodes_of_ranks) == even else 1
