"""See `equipoise.balancer.compat.vllm`."""

from equipoise.balancer.compat.vllm import (
    EplbPolicy,
    compute_logical_maps,
    preserve_intragpu_slots,
    rebalance_experts,
)

__all__ = ["EplbPolicy", "compute_logical_maps", "preserve_intragpu_slots", "rebalance_experts"]
