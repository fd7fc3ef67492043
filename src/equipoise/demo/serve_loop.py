"""A pass of one rank over the traffic, and the reference pass that outputs are compared with.

The reference is one process that serves the same requests without exchange and balancer.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch

from equipoise.balancer.experts.runtime.events import (
    NO_EVENTS,
    EventSink,
    StepDone,
    TraceSpan,
    Track,
    now,
)
from equipoise.demo.model import Decoder, KVCache, LocalExperts, ModelWeights, MoeLayer
from equipoise.demo.progress import RunProgress
from equipoise.demo.routing_recorder import RoutingRecorder
from equipoise.demo.run_record import Counts
from equipoise.demo.scheduler import RequestScheduler, RunningRequest, cache_slots
from equipoise.demo.settings import REFERENCE_NAME
from equipoise.demo.traffic import Traffic
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.stream import Stream


def serve_alone(weights: ModelWeights, traffic: Traffic, progress: RunProgress) -> RequestScheduler:
    """Serve everything where the weights are; the digests are what every variant must equal."""
    scheduler = RequestScheduler(traffic, rank=0, ranks=1)
    decoder, experts = Decoder(weights), LocalExperts(weights)
    cache = KVCache(weights.config, cache_slots(traffic, ranks=1), weights.device)
    progress.variant(REFERENCE_NAME, traffic.steps)
    began = time.perf_counter()
    for step in range(traffic.steps):
        batch = scheduler.next_batch(step)
        scheduler.add_logits(batch, decoder.forward(batch, cache, experts).cpu())
        progress.step(step + 1, float("nan"), f"{time.perf_counter() - began:.0f} s")
    scheduler.close()
    return scheduler


@dataclass
class PassMeasurements:
    """What one rank measured in one pass.

    `rows` int64 [steps, layers]: rows computed here; `experts` int64 [steps, layers, experts]:
    rows that this rank's tokens asked of each expert; `seconds` float64 [steps]. `step` is the one
    that is being counted, and `forward_number` the number of the forward pass: one a step, or
    several. Layers are the model's; this rank's are numbered from `first` on. `routing` records
    the experts of every token, where that is asked for.
    """

    rows: Counts
    experts: Counts
    seconds: np.ndarray[tuple[int], np.dtype[np.float64]]
    first: int = 0
    step: int = 0
    forward_number: int = 0
    routing: RoutingRecorder | None = None

    @staticmethod
    def sized(
        steps: int,
        layers: int,
        experts: int,
        first: int = 0,
        routing: RoutingRecorder | None = None,
    ) -> "PassMeasurements":
        """All zeros."""
        return PassMeasurements(
            np.zeros((steps, layers), dtype=np.int64),
            np.zeros((steps, layers, experts), dtype=np.int64),
            np.zeros(steps),
            first,
            routing=routing,
        )

    def count_computed(self, layer: int, rows: int) -> None:
        """`rows` of the current step were computed here, by this rank's layer of that number."""
        self.rows[self.step, self.first + layer] += rows

    def count_requested(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Tokens of the current step asked for these experts of this rank's layer."""
        experts = self.experts[self.step, self.first + layer]
        experts += np.bincount(expert_ids.cpu().numpy().ravel(), minlength=experts.size)
        if self.routing is not None:
            self.routing.add_layer(self.first + layer, expert_ids)


@dataclass(frozen=True, kw_only=True)
class ServeContext:
    """Where a rank serves: its model, its stream, its plane."""

    weights: ModelWeights
    compute: Stream
    control: ControlPlane
    rank: int
    ranks: int
    deadline: float


class CountingMoe:
    """Counts what each expert is asked for, then lets the inner layer do it."""

    def __init__(self, inner: MoeLayer, meter: PassMeasurements) -> None:
        self._inner = inner
        self._meter = meter

    def __call__(
        self, layer: int, x: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """See `MoeLayer`."""
        self._meter.count_requested(layer, expert_ids)
        return self._inner(layer, x, expert_ids, gates)


@dataclass
class ServeLoop:
    """Drives the model through every step of the traffic."""

    serving: ServeContext
    traffic: Traffic
    moe: MoeLayer
    meter: PassMeasurements
    around: Callable[[int], AbstractContextManager[None]]
    watch: Callable[[int], None]
    name: str
    events: EventSink = NO_EVENTS
    scheduler: RequestScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = RequestScheduler(self.traffic, self.serving.rank, self.serving.ranks)
        config = self.serving.weights.config
        self._decoder = Decoder(self.serving.weights)
        slots = cache_slots(self.traffic, self.serving.ranks)
        self._cache = KVCache(config, slots, self.serving.weights.device)
        self._layer = CountingMoe(self.moe, self.meter)

    def run(self) -> RequestScheduler:
        """Serve every step; returns the scheduler with all outputs.

        Raises:
            StreamFailed: a forward failed; its cause says why.
            VoteOutcomeUnknown: the balancer could not learn the outcome of a vote.
        """
        for step in range(self.traffic.steps):
            self.meter.step = self.meter.forward_number = step
            began = now()
            self._step(step)
            end = now()
            self.meter.seconds[step] = end - began
            self.events.emit(StepDone(step, began, end))
            self.watch(step)
        self.scheduler.close()
        return self.scheduler

    @property
    def newest_request(self) -> RunningRequest | None:
        """The last request of this rank that was admitted."""
        return self.scheduler.newest

    def _step(self, step: int) -> None:
        enter = self.serving.control.set_operation
        enter(f"the vote before step {step} ({self.name})")
        logits: list[torch.Tensor] = []
        with self.around(step):
            enter(f"step {step} ({self.name})")
            began = now()
            batch = self.scheduler.next_batch(step)
            self.serving.compute.launch(
                lambda: logits.append(self._decoder.forward(batch, self._cache, self._layer))
            )
        self.serving.compute.synchronize(self.serving.deadline * 2)
        details = {"step": step, "tokens": batch.rows}
        self.events.emit(TraceSpan("step", Track.COMPUTE, began, now(), details))
        if self.meter.routing is not None:
            self.meter.routing.end_step(step, self.scheduler.request_rows(batch))
        self.scheduler.add_logits(batch, logits[0].cpu())
