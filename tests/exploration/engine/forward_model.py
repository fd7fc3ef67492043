"""A model without a model: slots that say what they hold, and programs that read them as steps do.

A slot's bytes are all alike and name layer and expert. A program takes the generation word of a
layer, then the table that it names, then one half of each slot and the other, in a micro-step each:
whoever is not held sees a change that is half done.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from equipoise.backends.virtual.stream import VirtualStream
from equipoise.balancer.experts.placement import ExpertShape, Placement
from equipoise.hal.kernels import Tables
from equipoise.hal.slots import Segment, SlotLayout

WIDTH = 8
"""Bytes of a slot."""
HALF = WIDTH // 2


class Observation(NamedTuple):
    """What one stream of one rank saw of one layer in one step."""

    step: int
    layer: int
    rank: int
    reader: str
    generation: int
    table: bytes
    shares: bytes
    first: bytes
    second: bytes


def mark(layer: int, expert: int, experts: int) -> int:
    """What the bytes of an expert are."""
    return 1 + layer * experts + expert


def weights(placement: Placement, rank: int, shape: ExpertShape, staging: int) -> SlotLayout:
    """A rank's slots, filled as `placement` has them."""
    size = shape.slots_per_rank
    mine = placement[:, rank * size : (rank + 1) * size]
    marks = 1 + np.arange(shape.layers)[:, None] * shape.experts + mine
    stacked = np.repeat(marks.reshape(-1, 1), WIDTH, axis=1).astype(np.uint8)
    slots = tuple((Segment("weight", row),) for row in torch.from_numpy(stacked))
    return SlotLayout(slots, staging)


@dataclass
class Forward:
    """One rank's steps.

    Attributes:
        rank: whose they are.
        shape: how many of everything.
        layout: its slots.
        tables: its tables.
        counters: int32 [layers, experts], its load.
        reading: what a step reads a layer in.
        observations: what its streams saw, in the order in which they saw it.
    """

    rank: int
    shape: ExpertShape
    layout: SlotLayout
    tables: Tables
    counters: torch.Tensor
    reading: Callable[[int, int], AbstractContextManager[None]]
    observations: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots = [slot[0].data.numpy() for slot in self.layout.slots]
        self._generation = self.tables.generation.numpy()
        self._arrays = [
            array.numpy()
            for array in (self.tables.start, self.tables.replicas, self.tables.cumulative)
        ]
        self._loads: npt.NDArray[np.int32] = self.counters.numpy()

    def launch(self, readers: Mapping[str, VirtualStream], step: int) -> None:
        """A step: every layer in turn, on every stream that reads."""
        for layer in range(self.shape.layers):
            with self.reading(layer, step):
                for name, stream in readers.items():
                    stream.perform(partial(self._read, layer, name, step))

    def count(self, stream: VirtualStream, hot: int) -> None:
        """Add a step's rows: most of them for one expert, another one in each layer."""

        def program() -> None:
            self._loads += 1 + self.rank
            for layer in range(self.shape.layers):
                self._loads[layer, (hot + layer) % self.shape.experts] += 60

        stream.launch(program)

    def _read(self, layer: int, name: str, step: int) -> Iterator[None]:
        generation = int(self._generation[layer])
        yield
        start, replicas, cumulative = (array[generation & 1, layer] for array in self._arrays)
        table, shares = start.tobytes() + replicas.tobytes(), cumulative.tobytes()
        yield
        size = self.shape.slots_per_rank
        mine = self._slots[layer * size : (layer + 1) * size]
        first = b"".join([slot[:HALF].tobytes() for slot in mine])
        yield
        second = b"".join([slot[HALF:].tobytes() for slot in mine])
        self.observations.append(
            Observation(step, layer, self.rank, name, generation, table, shares, first, second)
        )
