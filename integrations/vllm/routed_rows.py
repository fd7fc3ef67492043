"""Rows of a layer to slots, as a part of the engine's forward; knows no engine.

A forward may be captured: then this runs once, and what it launched runs at every replay. Nothing
is read back, no shape depends on what is routed, every table keeps its address, and the step that
enters the hash is the one of the capture.
"""

import torch
from torch import Tensor

from equipoise.balancer.experts.family_balancer import LayerRouter
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.engine_streams import EngineStreams

PADDING = -1
"""An id that is no expert's: routed nowhere, and not counted (clause G6)."""


class Clock:
    """The forward that is being launched; one for all layers of a model.

    Attributes:
        step: its number.
        announced: how many forwards with tokens were announced.
    """

    def __init__(self) -> None:
        self.step = 0
        self.announced = 0


class RoutedRows:
    """Asks a layer's router.

    Args:
        router: of the layer.
        clock: tells the step.
        streams: the engine's.
        slots: of all ranks.

    Attributes:
        asked: whether the layer has ever come for slots.
    """

    def __init__(
        self, router: LayerRouter, clock: Clock, streams: EngineStreams, slots: int
    ) -> None:
        self.asked = False
        self._router = router
        self._clock = clock
        self._streams = streams
        self._slots = slots

    @torch.inference_mode(False)
    def map(self, topk_ids: Tensor, filled: Tensor) -> Tensor:
        """Slot ids for expert ids, both [rows, top_k]; counts the first `filled` rows.

        Rows behind them are padding and go to slots in turn: they are computed too, and would else
        load whoever serves the expert that an empty row happens to choose. Ids below 0 stay: those
        the engine has taken out itself.

        Args:
            topk_ids: of any integer type, which the slots have too.
            filled: int32 scalar on the device; read when the stream comes to it.
        """
        self.asked = True
        ids = topk_ids.to(torch.int32).contiguous()
        real = (torch.arange(ids.shape[0], device=ids.device) < filled).view(-1, 1)
        slots = self._routed(torch.where(real, ids, PADDING))
        turns = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device) % self._slots
        COUNTERS.add("routed_batches")
        found = torch.where(real, slots, turns.view_as(slots))
        return torch.where(ids < 0, ids, found).to(topk_ids.dtype)

    def _routed(self, ids: Tensor) -> Tensor:
        """Routers are asked by a program of the stream: they may meet other ranks within."""
        found: list[Tensor] = []
        step = self._clock.step
        self._streams.forward(lambda on: found.append(self._router.route(step, ids, on)))
        return found[0]
