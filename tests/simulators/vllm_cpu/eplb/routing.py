"""The mapping of vLLM's routers, on a CPU."""

from vllm.model_executor.layers.fused_moe.router import base_router

from vllm_cpu.eplb.mapping import map_and_record


def route_on_the_host() -> None:
    """Give vLLM's routers a mapping that maps.

    The hole: off CUDA and XPU `eplb_map_to_physical_and_record` returns the ids that it is given,
    and counts nothing, so that no load is ever balanced (vLLM issue 49702).
    """
    base_router.eplb_map_to_physical_and_record = map_and_record
