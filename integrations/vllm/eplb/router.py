"""Maps the expert ids of a layer to slots, as part of the forward pass.

A forward pass may be captured: then this code runs once, and what it launched runs at every
replay. So nothing is read back, no shape depends on routed values, all tables keep their addresses,
and the step number in the hash is that of the capture.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.balancer.experts.model_balancer import LayerRouter
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.streams import EngineStreams

PADDING_EXPERT_ID = -1
"""An id that is no expert's: it is not routed and not counted (clause G6)."""
PRECOMPUTED_ELEMENTS = 1 << 16
"""Largest batch, in elements, for which `PrecomputedIndices` launches nothing: 8,192 rows of 8
experts."""


class StepCounter:
    """Number of the forward pass being launched; shared by all layers of a model.

    Attributes:
        step: the number.
        announced_forwards: number of forward passes with tokens that were announced.
    """

    def __init__(self) -> None:
        self.step = 0
        self.announced_forwards = 0


class PrecomputedIndices:
    """Tensors that depend only on an element's index in a batch; shared by all layers.

    Every layer of every forward pass reads them; computing them anew took five launches each.

    Args:
        slots: number of slots of all ranks.
        device: the worker's.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots = slots
        self._device = device
        # Copied from the host synchronously: no stream can read them too early, and no graph
        # captures their computation.
        self._numbers = torch.arange(PRECOMPUTED_ELEMENTS, dtype=torch.int32).to(device)
        self._turns = (torch.arange(PRECOMPUTED_ELEMENTS, dtype=torch.int32) % slots).to(device)
        self.padding = torch.tensor(PADDING_EXPERT_ID, dtype=torch.int32).to(device)
        """int32 scalar."""

    def rows(self, count: int) -> Tensor:
        """Return the row numbers, int32 [count, 1]."""
        if count <= PRECOMPUTED_ELEMENTS:
            return self._numbers[:count].view(-1, 1)
        return torch.arange(count, dtype=torch.int32, device=self._device).view(-1, 1)

    def slots_in_turn(self, like: Tensor) -> Tensor:
        """Return slots in turn (0, 1, ... repeated), int32 in the shape of `like`."""
        count = like.numel()
        if count <= PRECOMPUTED_ELEMENTS:
            return self._turns[:count].view_as(like)
        slots_of_rows = torch.arange(count, dtype=torch.int32, device=self._device) % self._slots
        return slots_of_rows.view_as(like)


class PhysicalExpertRouter:
    """Maps expert ids to slots by a layer's router; padding rows are spread over all slots.

    Args:
        router: of the layer.
        step_counter: has the step number.
        streams: the engine's streams.
        indices: of the model.
        begin_reading: called with the step before the layer reads its slots.

    Attributes:
        was_called: whether the layer has ever asked for slots.
    """

    def __init__(
        self,
        router: LayerRouter,
        step_counter: StepCounter,
        streams: EngineStreams,
        indices: PrecomputedIndices,
        begin_reading: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.was_called = False
        self._router = router
        self._step_counter = step_counter
        self._streams = streams
        self._indices = indices
        self._begin_reading = begin_reading

    @torch.inference_mode(False)
    def to_slots(self, topk_ids: Tensor, unpadded_rows: Tensor) -> Tensor:
        """Map expert ids to slot ids, both [rows, top_k]; counts the first `unpadded_rows` rows.

        The rows after them are padding, and go to slots in turn: they are computed, too, and would
        otherwise load the rank of the expert that an empty row happens to choose. Negative ids
        stay: the engine has masked them itself.

        Args:
            topk_ids: of any integer dtype, which the slot ids have, too.
            unpadded_rows: int32 scalar on the device; read by the stream, not by the host.
        """
        self.was_called = True
        self._begin_reading(self._step_counter.step)
        ids = topk_ids.to(torch.int32).contiguous()
        real = self._indices.rows(ids.shape[0]) < unpadded_rows
        slots = self._route(torch.where(real, ids, self._indices.padding))
        COUNTERS.add("routed_expert_batches")
        slots_of_rows = torch.where(real, slots, self._indices.slots_in_turn(slots))
        return torch.where(ids < 0, ids, slots_of_rows).to(topk_ids.dtype)

    def _route(self, ids: Tensor) -> Tensor:
        """Call the router in a program of the stream: it may synchronize with other ranks."""
        slots_of_rows: list[Tensor] = []
        step = self._step_counter.step
        self._streams.launch_in_forward(
            lambda stream: slots_of_rows.append(self._router.route(step, ids, stream))
        )
        return slots_of_rows[0]
