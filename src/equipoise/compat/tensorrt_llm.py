"""See `equipoise.balancer.compat.tensorrt_llm`."""

from equipoise.balancer.compat.tensorrt_llm import (
    MoeLoadBalanceMetaInfo,
    MoePlacementCpuInfo,
    do_placement,
    do_replication,
)

__all__ = ["MoeLoadBalanceMetaInfo", "MoePlacementCpuInfo", "do_placement", "do_replication"]
