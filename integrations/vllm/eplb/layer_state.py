"""Mapping of expert ids to slots in the router of each layer of vLLM."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from vllm.distributed.eplb.eplb_state import EplbLayerState

from equipoise.integrations.vllm.eplb.router import PhysicalExpertRouter
from equipoise.integrations.vllm.patching import Patch


class LayerState(EplbLayerState):  # type: ignore[misc]
    """Replaces vLLM's EPLB state in the router of one layer.

    vLLM's RFC 49702 names the hook `map_and_record`.

    Args:
        router: of the layer.
        stock: the state that it replaces, with the tensors that vLLM's runner fills.
    """

    def __init__(self, router: PhysicalExpertRouter, stock: EplbLayerState) -> None:
        super().__init__(**vars(stock))
        self._router = router

    def map_and_record(self, topk_ids: Tensor, micro_batch: int = 0) -> Tensor:
        """Map expert ids to slot ids, both [rows, top_k]; counts rows that are not padding."""
        unpadded_rows = self.num_unpadded_tokens_tensors
        assert unpadded_rows is not None
        return self._router.to_slots(topk_ids, unpadded_rows[micro_batch])


def _wrap_apply_eplb_mapping(
    stock: Callable[[Any, Tensor], Tensor],
) -> Callable[[Any, Tensor], Tensor]:
    from vllm.v1.worker.ubatching import dbo_current_ubatch_id

    @wraps(stock)
    def _apply_eplb_mapping(self: Any, topk_ids: Tensor) -> Tensor:
        if isinstance(self.eplb_state, LayerState):
            return self.eplb_state.map_and_record(topk_ids, dbo_current_ubatch_id())
        return stock(self, topk_ids)

    return _apply_eplb_mapping


ROUTER_PATCH = Patch(
    "vllm.model_executor.layers.fused_moe.router.base_router",
    "BaseRouter._apply_eplb_mapping",
    _wrap_apply_eplb_mapping,
)
"""Layers with our state use it; all others use vLLM's."""
