"""See `equipoise.balancer.compat.deepseek`."""

from equipoise.balancer.compat.deepseek import (
    rebalance_experts,
)

__all__ = ["rebalance_experts"]
