"""A case for a pool of ranks: the slots that SGLang's own router gives to batches."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from sglang.srt.eplb import expert_location
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.layers.moe import topk

from equipoise.hal.communicator import Fabric
from equipoise.integrations.sglang import local_dispatch
from sglang_cpu.eplb_manager import MODEL_CONFIG, WIDTH, configuration, group, plugin


def route(
    fabric: Fabric, address: str, placements: Any, batches: Any, **case: Any
) -> dict[str, Any]:
    """The slots that SGLang's own router gives to batches, before and after an update.

    Args:
        fabric: of the case, for rank and size.
        address: a file where the ranks meet, as a URL.
        placements: two, (layers, slots).
        batches: of each, `layer`, `ids` (rows, top_k), and `unpadded` rows, or None.
        case: `experts`, `updated` (layers that get the second placement), `plugin`, `backend`
            (SGLang's word for the all-to-all), `frozen` (whether tables stay as they were first),
            `compiled` (how many batches go through compiled code, too).

    Returns:
        `before` and `after` the update, and `compiled`: of each batch, slots (rows, top_k).
    """
    layers, slots = len(placements[0]), len(placements[0][0])
    numbers = ModelConfigForExpertLocation(layers, case["experts"], 1)
    with ExitStack() as stack:
        stack.enter_context(group(fabric, address))
        stack.enter_context(plugin(case["plugin"]))
        redundant = slots - case["experts"]
        parts = fabric, numbers, redundant, None, "dynamic", case["backend"]
        stack.enter_context(configuration(*parts))
        first, second = (
            ExpertLocationMetadata.init_by_mapping(MODEL_CONFIG, placement, fabric.control.rank)
            for placement in placements
        )
        expert_location.set_global_expert_location_metadata(first, allow_overwrite=True)
        before = [selected(batch) for batch in batches]
        if case["frozen"]:
            stack.enter_context(patch.object(local_dispatch.LocalDispatch, "install"))
        first.update(second, update_layer_ids=case["updated"])
        after = [selected(batch) for batch in batches]
        compiled = [selected(batch, compiled_mapping) for batch in batches[: case["compiled"]]]
        dist.barrier()  # nothing else is sent: one rank could leave while the other still connects
    return {"before": before, "after": after, "compiled": compiled}


def selected(batch: Mapping[str, Any], mapping: Any = None) -> Any:
    """(rows, top_k): the slots of a batch whose router has selected these experts.

    `mapping` in place of SGLang's code from the selected experts on.
    """
    ids, unpadded = torch.tensor(batch["ids"]), batch["unpadded"]
    rows = None if unpadded is None else torch.tensor(unpadded, dtype=torch.int32)
    rows, info = topk.resolve_routing_inputs(
        layer_id=batch["layer"], is_draft=False, num_token_non_padded=rows
    )
    if mapping is not None:
        return mapping(ids, info, rows).tolist()
    with torch.inference_mode():
        output = topk.select_experts(
            torch.zeros(len(ids), WIDTH),
            torch.zeros(len(ids), 1),
            topk.TopKConfig(
                top_k=ids.shape[1],
                custom_routing_function=lambda **_: (torch.ones(ids.shape), ids.clone()),
            ),
            layer_id=batch["layer"],
            num_token_non_padded=rows,
            expert_location_dispatch_info=info,
        )
    return output.topk_ids.tolist()


def compiled_mapping(ids: torch.Tensor, info: Any, rows: torch.Tensor | None) -> torch.Tensor:
    """What SGLang compiles on a GPU, as one graph."""
    function: Any = topk._biased_grouped_topk_postprocess
    whole: Any = torch.compile(
        function._torchdynamo_orig_callable, backend="aot_eager", fullgraph=True, dynamic=True
    )
    slots: torch.Tensor = whole(ids, info, rows)
    return slots
