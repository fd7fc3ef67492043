"""How fast experts move, and when a move pays."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.report.placement.spread import Reals

Copies = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TransferRate:
    """A link, an expert and a step: what a rank can receive.

    Source of the reckoning: TensorRT-LLM tech blog 4, figure 15: experts of 24 MiB within 50 ms.

    Attributes:
        bytes_per_second: of the link, into a rank.
        expert_bytes: of an expert in one layer.
        latency: seconds of a step.
    """

    bytes_per_second: float
    expert_bytes: int
    latency: float

    @property
    def experts_per_step(self) -> int:
        """Whole ones that a rank can receive within a step."""
        return int(self.bytes_per_second * self.latency) // self.expert_bytes

    def steps(self, copies: int) -> int:
        """Steps until a rank has received so many: an expert that is too big takes several."""
        if self.experts_per_step:
            return -(-copies // self.experts_per_step)
        return copies * math.ceil(self.expert_bytes / (self.bytes_per_second * self.latency))

    def transfer(self, copies: int) -> float:
        """Seconds, at the full rate of the link."""
        return copies * self.expert_bytes / self.bytes_per_second


@dataclass(frozen=True)
class MigrationCost:
    """From one placement to another.

    Attributes:
        name: for people.
        copies: that a rank does not hold yet, over all ranks and layers.
        busiest: copies that the rank which receives most receives, over all layers.
        steps: that these take, overlapped with the forward pass.
        bulk_stall: seconds where serving pauses until all have arrived.
        layer_stall: seconds where each layer's copies have to arrive within a step, while the layer
            itself is not computing, and serving waits for what does not.
    """

    name: str
    copies: int
    busiest: int
    steps: int
    bulk_stall: float
    layer_stall: float


def incoming_copies(old: ExpertPlacement, new: ExpertPlacement) -> Copies:
    """(layers, ranks): copies whose rank does not hold their expert yet. Layers are the same."""
    copies = np.empty((len(new.layers), new.ranks), dtype=np.int64)
    for layer, (before, after) in enumerate(zip(old.placement, new.placement, strict=True)):
        for rank, old_experts in enumerate(before.reshape(old.ranks, -1)):
            new_experts = after.reshape(new.ranks, -1)[rank]
            copies[layer, rank] = int((~np.isin(new_experts, old_experts)).sum())
    return copies


def migration_cost(
    name: str, copies: Copies, pace: TransferRate, layer_seconds: Reals
) -> MigrationCost:
    """What (layers, ranks) copies cost; `layer_seconds` (layers,) is what a layer computes."""
    busiest = int(copies.sum(axis=0).max())
    slack = np.maximum(pace.latency - layer_seconds, 0.0)
    arriving = copies.max(axis=1) * pace.transfer(1)
    return MigrationCost(
        name=name,
        copies=int(copies.sum()),
        busiest=busiest,
        steps=pace.steps(busiest),
        bulk_stall=pace.transfer(busiest),
        layer_stall=float(np.maximum(arriving - slack, 0.0).sum()),
    )


def break_even(stall: float, saved: float) -> int | None:
    """Steps after which what is saved a step outweighs a stall; None: never. Both in seconds."""
    if stall <= 0:
        return 0
    if saved <= 0:
        return None
    return math.ceil(stall / saved)
