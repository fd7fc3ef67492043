"""How the vLLM part configures our engine: cadence, planner options, staging.

In a module without vLLM, so that a benchmark and a test can ask for what a worker gets.
"""

import math
from collections.abc import Sequence
from typing import Any

from equipoise.balancer.experts.config import BalancerConfig, PlannerOptions, ShareMode
from equipoise.balancer.experts.placement import SHARE_ONE
from equipoise.balancer.experts.weights.expert_weights import LayerGroup
from equipoise.integrations.vllm.settings import EplbSettings

MIB = 1 << 20


def balancer_config(
    settings: EplbSettings, eplb_config: Any, number: int, ranks_sharing_rows: int, nodes: int
) -> BalancerConfig:
    """In the words of vLLM's `EPLBConfig`, where it has them.

    Args:
        settings: of the part.
        eplb_config: vLLM's `EPLBConfig`.
        number: of the model, in the order in which they come.
        ranks_sharing_rows: see `BalancerConfig`.
        nodes: see `BalancerConfig`.
    """
    window = min(eplb_config.window_size, eplb_config.step_interval)
    sub_window = settings.sub_window or default_sub_window(window, eplb_config.step_interval)
    return BalancerConfig(
        name=f"vllm{number}",
        shares=ShareMode(settings.replica_split),
        window_size=max(window // sub_window, 1) * sub_window,
        step_interval=eplb_config.step_interval,
        sub_window=sub_window,
        planner=PlannerOptions(target=settings.target_imbalance),
        min_gain=round(settings.min_improvement * SHARE_ONE),
        nodes=nodes,
        ranks_sharing_rows=ranks_sharing_rows,
        log_balancedness=eplb_config.log_balancedness,
        log_balancedness_interval=eplb_config.log_balancedness_interval,
        timeout=settings.timeout_seconds,
    )


def staging_budget(settings: EplbSettings, groups: Sequence[LayerGroup]) -> int:
    """Bytes of staging on a rank, over all families of a model.

    As many as the settings ask for, but a slot of each family at least; where they ask for nothing,
    a layer of each family.
    """
    if settings.staging_mib is None:
        return sum(group.nbytes // len(group.layers) for group in groups)
    minimum = sum(group.slot_bytes for group in groups)
    return max(int(settings.staging_mib * MIB), minimum)


def node_count(node_of_rank: Sequence[int]) -> int:
    """Nodes that ranks divide among evenly, neighbours together; 1 where they do not.

    Args:
        node_of_rank: the node of each rank, numbered as they first come.
    """
    nodes = max(node_of_rank) + 1
    ranks_per_node, remainder = divmod(len(node_of_rank), nodes)
    even = [rank // ranks_per_node for rank in range(len(node_of_rank))] if not remainder else []
    return nodes if list(node_of_rank) == even else 1


def default_sub_window(window: int, interval: int) -> int:
    """Steps that divide the interval, as near to a quarter of the window as can be; the window is
    then rounded down to a multiple."""
    target = max(window / 4, 1.0)
    divisors = [steps for steps in range(1, window + 1) if interval % steps == 0]
    return min(divisors, key=lambda steps: abs(math.log(steps / target)))
