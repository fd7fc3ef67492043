"""Expert kernels of the CPU build that know that some experts live elsewhere."""

import inspect
from functools import wraps
from typing import Any

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from vllm_cpu.local_experts import only_local


def follow_expert_map() -> None:
    """Let `CPUUnquantizedExperts.apply` compute only experts that are here.

    The hole: it ignores `expert_map`, and indexes the weights of this rank by the ids of all of
    them; a worker dies of SIGSEGV (vLLM issue 57837, PR 47778). An expert of another rank becomes
    the first of this one with weight zero: the rows are computed for nothing, and add nothing.
    """
    stock = CPUUnquantizedExperts.apply
    if hasattr(stock, "__wrapped__"):
        return
    shape = inspect.signature(stock)

    @wraps(stock)
    def apply(*arguments: Any, **options: Any) -> None:
        call = shape.bind(*arguments, **options).arguments
        if call["expert_map"] is not None:
            if call["apply_router_weight_on_input"]:
                raise NotImplementedError("weights on the input cannot silence remote experts")
            ids, weights = only_local(call["expert_map"], call["topk_ids"], call["topk_weights"])
            call |= {"topk_ids": ids, "topk_weights": weights}
        stock(**call)

    CPUUnquantizedExperts.apply = apply
