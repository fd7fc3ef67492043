"""Where a rank of `engine.py` runs, and the slots that it holds there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from emulated_device import Emulated, EmulatedStore
from emulated_link import LinkedFabric
from engine_traffic import SHAPE, Given, start

from equipoise.hal.slots import Segment, SlotLayout

PER_RANK = SHAPE.slots_per_rank


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        device: emulated.
        fabric: whose exchanges of weights go over the emulated link.
        rank: this one.
        label: of the run; no two have the same.
        rows: int64 (layers, experts, 2), the weights in the host's memory.
        plans: to be executed, in order.
    """

    device: Emulated
    fabric: LinkedFabric
    rank: int
    label: str
    rows: torch.Tensor
    plans: Sequence[Given]


def weights() -> torch.Tensor:
    """int64 (layers, experts, 2): what stands for every expert: its layer and its number."""
    layers = torch.arange(SHAPE.layers).view(-1, 1).expand(-1, SHAPE.experts)
    experts = torch.arange(SHAPE.experts).view(1, -1).expand(SHAPE.layers, -1)
    return torch.stack([layers, experts], dim=2).contiguous()


def slots_of(
    place: Place, kind: type[EmulatedStore], staging: int
) -> tuple[torch.Tensor, EmulatedStore]:
    """This rank's slots, filled with the start layout, and their store."""
    mine = slice(place.rank * PER_RANK, (place.rank + 1) * PER_RANK)
    first = torch.from_numpy(start().placement[:, mine].astype(np.int64))
    held = torch.stack([place.rows[layer, experts] for layer, experts in enumerate(first)])
    slots = tuple((Segment("stands for an expert", row),) for row in held.flatten(0, 1))
    inner = place.device.slot_store(SlotLayout(slots, staging))
    return held, kind(inner, place.device)
