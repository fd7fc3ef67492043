"""What replay has to know of an engine's balancer: its plans, its dispatch and its cadence."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.placement import ExpertShape, Load, Placement, initial_placement

Ids = npt.NDArray[np.int32]
"""(tokens, top_k): experts that tokens chose, or slots that they are sent to; -1 for none."""
Parts = npt.NDArray[np.float32]
"""(layers, slots): part of its expert's rows that each slot gets; their sum is 1 per expert."""


class SplitKind(StrEnum):
    """How the rows of an expert with several replicas come to be divided."""

    DRAWN = "drawn"
    """Row by row, as by chance: the parts are odds."""
    IN_TURN = "in turn"
    """Row by row, one replica after the other: even, to the row."""
    BY_SOURCE = "by source"
    """Each rank sends all of its rows of an expert to one replica: the parts count ranks."""
    BY_BATCH = "by batch"
    """To the batch's own counts, solved for each step: parts are not known beforehand."""


@dataclass(frozen=True)
class WindowLoad:
    """What was counted since the last plan, or over the engine's window.

    Attributes:
        experts: int64 (layers, experts), rows.
        slots: int64 (layers, slots), rows as they were dispatched.
        steps: how many steps were counted.
        windows: int64 (windows, layers, experts), the same rows as `experts` by part of the time;
            empty where the engine asks for one sum.
    """

    experts: Load
    slots: Load
    steps: int
    windows: Load = field(default_factory=lambda: np.empty((0, 0, 0), np.int64))


class DispatchRule(Protocol):
    """How rows of an expert are sent to its replicas."""

    @property
    def name(self) -> str:
        """As the engine's option calls it."""
        ...

    @property
    def split(self) -> SplitKind:
        """What `parts` are."""
        ...

    def parts(self, placement: Placement, shape: ExpertShape) -> Parts:
        """Parts that slots get if all ranks send equally many rows of every expert.

        Raises `NotImplementedError` where the split is `BY_BATCH`.
        """
        ...

    def route(
        self,
        ids: Ids,
        sources: Ids,
        placement: Placement,
        shape: ExpertShape,
        layer: int,
        step: int,
    ) -> Ids:
        """The slots of one layer's rows, as the engine's own function gives them.

        Args:
            ids: of the tokens of a step, in the order of their ranks.
            sources: int32 (tokens,), the rank of each.
            placement: of all layers.
            shape: numbers of layers, experts, slots and ranks.
            layer: place of the layer.
            step: number of the step, which seeds what the engine draws at random.
        """
        ...


class Planner(Protocol):
    """How an engine plans."""

    def __call__(self, load: WindowLoad, installed: Placement, shape: ExpertShape) -> Placement:
        """The next placement, int32 (layers, slots)."""
        ...


@dataclass(frozen=True)
class Cadence:
    """When an engine plans, and how the plan takes effect.

    Attributes:
        window: steps of load that a plan is made from, the last ones.
        interval: steps from plan to plan.
        first: steps before the first plan.
        layers_per_step: layers that take their new weights in a step; None for all at once.
        blocking: whether serving pauses while weights move.
        source: where these defaults stand.
        latency: steps from a plan to the first step that serves with it, where serving does not
            pause; at least 1.
    """

    window: int
    interval: int
    first: int
    layers_per_step: int | None
    blocking: bool
    source: str
    latency: int = 1


@dataclass(frozen=True)
class EngineModel:
    """One engine's balancer.

    Attributes:
        name: as `--engine` takes it.
        version: of the engine that the model was compared with.
        cadence: its defaults.
        planner: its default policy.
        rules: dispatch rules by name; the first is the engine's default.
        policies: further policies by name.
        initial: the placement that it begins with; raises `PlacementError` for a shape that the
            engine refuses.
    """

    name: str
    version: str
    cadence: Cadence
    planner: Planner
    rules: tuple[DispatchRule, ...]
    policies: dict[str, Planner] = field(default_factory=dict)
    initial: Callable[[ExpertShape], Placement] = initial_placement
