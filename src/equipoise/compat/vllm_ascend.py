"""See `equipoise.balancer.compat.vllm_ascend`."""

from equipoise.balancer.compat.vllm_ascend import (
    EplbPolicy,
    rebalance_experts,
)

__all__ = ["EplbPolicy", "rebalance_experts"]
