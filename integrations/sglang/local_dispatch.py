"""Dispatch `local` in SGLang: each rank divides its batch, and all ranks get as many of its rows.

SGLang's `dynamic` picks the slot of each row by itself. These hooks take the place of its function
that maps experts to slots; how a batch is divided says `equipoise.hal.levelled_routing`. No rank
waits for another, no host for a device, and all tensors that outlive a call keep their addresses:
so it runs in SGLang's captured graphs, too.

SGLang tells that function neither which layer it is called for, nor which rows are padding. Its
routers ask `resolve_routing_inputs` for both first; so what that returns is marked with them.

Without an all-to-all backend all ranks compute the same rows, each by its own experts, and have to
agree on the slot of each. There all hash alike, and padding may not be counted: what it holds
differs between ranks, and would change how the other rows are divided.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.balancer.compat.input_arrays import integer_ids
from equipoise.balancer.experts.placement import ExpertShape, even_shares
from equipoise.balancer.experts.routing.layer_update import build_tables
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import IntegrationError
from equipoise.hal.kernels import Salt, Tables
from equipoise.integrations.vllm.eplb.policy_plan import valid_placement
from equipoise.integrations.vllm.streams import EngineStreams
from equipoise.integrations.vllm.worker_context import backend_of_device, open_device

REPLACED_ALGORITHM = "dynamic"
"""Word of `--ep-dispatch-algorithm` whose place this dispatch takes. SGLang's code for `static` and
`lp` does not call its mapping function everywhere."""
DISPATCH = "equipoise_local_dispatch"
"""Attribute of SGLang's `ExpertLocationMetadata`, a `LocalDispatch`."""
BATCH = "equipoise_batch"
"""Attribute of SGLang's `ExpertLocationDispatchInfo`, a `Batch`."""
PADDING = -1
"""An id that is no expert's: not routed and not counted (clause G6)."""
DEADLINE = 60.0
"""Seconds that a batch may take on a CPU, where it is waited for."""

OPERATOR = "equipoise_sglang::local_slots"
"""An operator of torch, which a compiler leaves alone: SGLang compiles the code around its mapping
function."""


class Batch(NamedTuple):
    """What a call of SGLang's mapping function has to know.

    Attributes:
        layer: the layer's number.
        unpadded_rows: integer scalar on the device, how many rows come before the padding; None if
            all count.
    """

    layer: int
    unpadded_rows: Tensor | None


class LocalDispatch:
    """Divides the batches of all layers of a model, by tables of its own on the device.

    Args:
        metadata: SGLang's `ExpertLocationMetadata`, whose placement is installed.
        rank: enters the rounding; ranks that route the same rows have the same.

    Raises:
        IntegrationError: we have no backend for the device, its kernels level a batch only through
            the host, or an expert has no slot.
        BackendUnavailable: the backend does not run here.
    """

    def __init__(self, metadata: Any, rank: int) -> None:
        device = metadata.physical_to_logical_map.device
        self.shape = _shape(metadata)
        self._rank = rank
        self._accelerator, self._streams = _open(device)
        # SGLang may be in inference mode, whose tensors nobody else could write to.
        with torch.inference_mode(False):
            self._tables = Tables.empty(
                self.shape.layers, self.shape.experts, self.shape.slots, self.shape.ranks, device
            )
        self.install(metadata, range(self.shape.layers))
        # Kernels are compiled now, and not while a graph is captured.
        with self._streams.ordered_section():
            self._accelerator.kernels.warm(self._tables, self._streams.compute_stream)

    def install(self, metadata: Any, layers: Sequence[int]) -> None:
        """Fill the tables of some layers, in the order of the forward passes on the device.

        Raises `IntegrationError` if the placement has another shape, or an expert has no slot.
        """
        if _shape(metadata) != self.shape:
            raise IntegrationError(
                f"equipoise: dispatch local cannot follow a change from {self.shape} to "
                f"{_shape(metadata)}"
            )
        held = integer_ids(metadata.physical_to_logical_map_cpu, "physical_to_logical_map")
        rows = list(layers)
        placement = valid_placement(held[rows], replace(self.shape, layers=len(rows)))
        if placement is None:
            raise IntegrationError("equipoise: dispatch local needs a slot for every expert")
        shares = even_shares(placement, self.shape.experts)  # no levelled pass reads them
        update = build_tables(placement, shares, self.shape, rows)
        with self._streams.ordered_section():
            stream = self._streams.compute_stream
            self._accelerator.kernels.commit_tables(update, self._tables, stream)

    def slots(self, topk_ids: Tensor, unpadded_rows: Tensor | None, layer: int) -> Tensor:
        """Map expert ids to slots, both [rows, top_k] of any integer dtype.

        Padding stays as it is: rows from `unpadded_rows` on, and ids of no expert.
        """
        ids = topk_ids.to(torch.int32)
        if unpadded_rows is not None:
            numbers = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
            ids = ids.masked_fill((numbers >= unpadded_rows).view(-1, 1), PADDING)
        flat = ids.reshape(-1).contiguous()
        slots = torch.empty_like(flat)
        counts = torch.empty(self.shape.experts, dtype=torch.int32, device=ids.device)
        self._streams.launch_in_forward(
            lambda stream: self._accelerator.kernels.route_levelled(
                flat, self._tables, Salt(self._rank, layer, 0), None, slots, counts, stream
            )
        )
        slots = slots.view(ids.shape)
        routed = slots < self.shape.slots
        return torch.where(routed, slots.to(topk_ids.dtype), topk_ids).contiguous()

    def close(self) -> None:
        """Close the device."""
        self._accelerator.close()


def choose_algorithm(server_args: Any) -> None:
    """Have SGLang take the algorithm that is replaced, unless `--ep-dispatch-algorithm` is given.

    Before it takes its own default, which is `static` with an all-to-all backend.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if resolving_view(server_args).ep_dispatch_algorithm is None:
        declare_resolution(server_args, "equipoise", ep_dispatch_algorithm=REPLACED_ALGORITHM)


def check_arguments(arguments: Any) -> None:
    """Raise `IntegrationError`, one line, where SGLang's arguments do not go with this dispatch."""
    if arguments.ep_dispatch_algorithm != REPLACED_ALGORITHM:
        raise IntegrationError(
            "equipoise cannot be switched on: dispatch local takes the place of "
            f"--ep-dispatch-algorithm {REPLACED_ALGORITHM}, not of "
            f"{arguments.ep_dispatch_algorithm}"
        )
    if arguments.elastic_ep_backend is not None:
        raise IntegrationError(
            "equipoise cannot be switched on: dispatch local is not for --elastic-ep-backend, "
            "where ranks come and go"
        )


def follow_metadata(stock: Callable[..., None], value: Any, allow_overwrite: bool = False) -> None:
    """Around `set_global_expert_location_metadata`: fill the tables from the new metadata.

    Those of a captured graph keep their addresses: what replaces metadata takes over its tables.
    """
    from sglang.srt.eplb import expert_location

    replaced = expert_location.get_global_expert_location_metadata()
    stock(value, allow_overwrite)
    if value is None:  # a model without experts
        return
    dispatch = getattr(replaced, DISPATCH, None)
    if dispatch is None:
        same_rows = expert_location.get_exec().moe.moe_a2a_backend == "none"
        rank = 0 if same_rows else torch.distributed.get_rank() % value.ep_size
        dispatch = LocalDispatch(value, rank)
    else:
        dispatch.install(value, range(value.num_layers))
    setattr(value, DISPATCH, dispatch)


def follow_update(
    stock: Callable[..., None], metadata: Any, other: Any, update_layer_ids: Sequence[int]
) -> None:
    """Around `ExpertLocationMetadata.update`: fill the tables of the layers that change."""
    stock(metadata, other, update_layer_ids)
    dispatch: LocalDispatch | None = getattr(metadata, DISPATCH, None)
    if dispatch is not None:
        dispatch.install(metadata, update_layer_ids)


def mark_batch(
    stock: Callable[..., tuple[Tensor | None, Any]], *, layer_id: int, **inputs: Any
) -> tuple[Tensor | None, Any]:
    """Around `resolve_routing_inputs`: mark what it returns with the layer and its padding."""
    unpadded_rows, info = stock(layer_id=layer_id, **inputs)
    if info is not None:  # it is None in draft models
        setattr(info, BATCH, Batch(layer_id, unpadded_rows))
    return unpadded_rows, info


def map_to_slots(
    stock: Callable[..., Tensor], topk_ids: Tensor, info: Any, log2phy_prob: Tensor | None = None
) -> Tensor:
    """Around `topk_ids_logical_to_physical`: a marked batch is divided here."""
    batch: Batch | None = getattr(info, BATCH, None)
    if batch is None:
        return stock(topk_ids, info, log2phy_prob)
    slots: Tensor = torch.ops.equipoise_sglang.local_slots(
        topk_ids, batch.unpadded_rows, batch.layer
    )
    return slots


def _local_slots(topk_ids: Tensor, unpadded_rows: Tensor | None, layer: int) -> Tensor:
    from sglang.srt.eplb import expert_location

    metadata = expert_location.get_global_expert_location_metadata()
    dispatch: LocalDispatch = getattr(metadata, DISPATCH)
    return dispatch.slots(topk_ids, unpadded_rows, layer)


def _empty_slots(topk_ids: Tensor, unpadded_rows: Tensor | None, layer: int) -> Tensor:
    return torch.empty_like(topk_ids, memory_format=torch.contiguous_format)


torch.library.define(OPERATOR, "(Tensor topk_ids, Tensor? unpadded_rows, int layer) -> Tensor")
torch.library.impl(OPERATOR, "CompositeExplicitAutograd", _local_slots)
torch.library.register_fake(OPERATOR, _empty_slots)


def _shape(metadata: Any) -> ExpertShape:
    return ExpertShape(
        metadata.num_layers,
        metadata.num_logical_experts,
        metadata.num_physical_experts,
        metadata.ep_size,
    )


def _open(device: torch.device) -> tuple[Accelerator, EngineStreams]:
    """Open the device, if its kernels level a batch by themselves."""
    accelerator, streams = open_device(backend_of_device(device), device, DEADLINE)
    if not accelerator.kernels.levels_on_device:
        accelerator.close()
        raise IntegrationError(
            "equipoise cannot be switched on: dispatch local is not for a device of type "
            f"{device.type}: each layer would wait for the host"
        )
    return accelerator, streams
