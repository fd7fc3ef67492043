"""What a rank has for all variants of a run: settings, device, fabric, traffic, model."""

from dataclasses import dataclass

from equipoise.balancer.experts.placement import ExpertShape, Layout
from equipoise.demo.grid import Grid
from equipoise.demo.model import ModelWeights
from equipoise.demo.observers import Observers
from equipoise.demo.routing_recorder import RoutingRecorder
from equipoise.demo.serve_loop import ServeContext
from equipoise.demo.settings import RunSettings
from equipoise.demo.traffic import Traffic
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric


@dataclass(frozen=True)
class RunContext:
    """All that outlives a pass on one rank.

    Attributes:
        settings: what was asked for.
        accelerator: the rank's device.
        run_fabric: the fabric of all ranks.
        stage_fabric: of the ranks of this stage, which share its experts; of all ranks where there
            is one stage.
        rank: of the run.
        grid: which rank does what.
        weights: the whole model.
        serving: where the rank serves: its stage's ranks, layers and control plane.
        traffic: what is served.
        observers: event sinks.
        layout: what was given to be served unchanged, of all layers; None where nothing was.
        routing: records the experts of every token; None where that is not asked for.
    """

    settings: RunSettings
    accelerator: Accelerator
    run_fabric: Fabric
    stage_fabric: Fabric
    rank: int
    grid: Grid
    weights: ModelWeights
    serving: ServeContext
    traffic: Traffic
    observers: Observers
    layout: Layout | None
    routing: RoutingRecorder | None = None

    @property
    def layers(self) -> range:
        """The layers of this rank's stage."""
        return self.grid.layers(self.rank, self.weights.config.layers)

    def shape(self, slots: int) -> ExpertShape:
        """Of the stage's layers in so many slots."""
        config = self.serving.weights.config
        return ExpertShape(config.layers, config.experts, slots, self.serving.ranks)
