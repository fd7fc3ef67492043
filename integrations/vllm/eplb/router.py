"""Rows of a layer to slots, as a part of the engine's forward; knows no engine.

A forward may be captured: then this runs once, and what it launched runs at every replay. Nothing
is read back, no shape depends on what is routed, every table keeps its address, and the step that
enters the hash is the one of the capture.
"""

import torch
from torch import Tensor

from equipoise.balancer.experts.model_balancer import LayerRouter
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.streams import EngineStreams

PADDING_EXPERT_ID = -1
"""An id that is no expert's: routed nowhere, and not counted (clause G6)."""
PRECOMPUTED_ELEMENTS = 1 << 16
"""Elements of a batch up to which `BatchIndices` launches nothing: 8,192 rows of 8 experts."""


class StepCounter:
    """The forward that is being launched; one for all layers of a model.

    Attributes:
        step: its number.
        announced_forwards: how many forwards with tokens were announced.
    """

    def __init__(self) -> None:
        self.step = 0
        self.announced_forwards = 0


class PrecomputedIndices:
    """What depends on an element's index in a batch alone, on the device; one for all layers.

    Every layer of every forward reads it: computed anew it was five launches of each.

    Args:
        slots: of all ranks.
        device: the worker's.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots = slots
        self._device = device
        # Made on the host: no stream can come before it, and no graph makes it anew.
        self._numbers = torch.arange(PRECOMPUTED_ELEMENTS, dtype=torch.int32).to(device)
        self._turns = (torch.arange(PRECOMPUTED_ELEMENTS, dtype=torch.int32) % slots).to(device)
        self.padding = torch.tensor(PADDING_EXPERT_ID, dtype=torch.int32).to(device)
        """int32 scalar."""

    def rows(self, count: int) -> Tensor:
        """The number of each row, int32 [count, 1]."""
        if count <= PRECOMPUTED_ELEMENTS:
            return self._numbers[:count].view(-1, 1)
        return torch.arange(count, dtype=torch.int32, device=self._device).view(-1, 1)

    def slots_in_turn(self, like: Tensor) -> Tensor:
        """Slots in turn, int32 and of the shape of `like`."""
        count = like.numel()
        if count <= PRECOMPUTED_ELEMENTS:
            return self._turns[:count].view_as(like)
        slots_of_rows = torch.arange(count, dtype=torch.int32, device=self._device) % self._slots
        return slots_of_rows.view_as(like)


class PhysicalExpertRouter:
    """Asks a layer's router.

    Args:
        router: of the layer.
        step_counter: tells the step.
        streams: the engine's.
        indices: of the model.

    Attributes:
        was_called: whether the layer has ever come for slots.
    """

    def __init__(
        self,
        router: LayerRouter,
        step_counter: StepCounter,
        streams: EngineStreams,
        indices: PrecomputedIndices,
    ) -> None:
        self.was_called = False
        self._router = router
        self._step_counter = step_counter
        self._streams = streams
        self._indices = indices

    @torch.inference_mode(False)
    def to_slots(self, topk_ids: Tensor, unpadded_rows: Tensor) -> Tensor:
        """Slot ids for expert ids, both [rows, top_k]; counts the first `unpadded_rows` rows.

        Rows behind them are padding and go to slots in turn: they are computed too, and would else
        load whoever serves the expert that an empty row happens to choose. Ids below 0 stay: those
        the engine has taken out itself.

        Args:
            topk_ids: of any integer type, which the slots have too.
            unpadded_rows: int32 scalar on the device; read when the stream comes to it.
        """
        self.was_called = True
        ids = topk_ids.to(torch.int32).contiguous()
        real = self._indices.rows(ids.shape[0]) < unpadded_rows
        slots = self._route(torch.where(real, ids, self._indices.padding))
        COUNTERS.add("routed_expert_batches")
        slots_of_rows = torch.where(real, slots, self._indices.slots_in_turn(slots))
        return torch.where(ids < 0, ids, slots_of_rows).to(topk_ids.dtype)

    def _route(self, ids: Tensor) -> Tensor:
        """Routers are asked by a program of the stream: they may meet other ranks within."""
        slots_of_rows: list[Tensor] = []
        step = self._step_counter.step
        self._streams.launch_in_forward(
            lambda stream: slots_of_rows.append(self._router.route(step, ids, stream))
        )
        return slots_of_rows[0]
