"""See `equipoise.balancer.compat.sglang`."""

from equipoise.balancer.compat.sglang import (
    rebalance_experts,
)

__all__ = ["rebalance_experts"]
