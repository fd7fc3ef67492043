"""Where a rank serves, whatever it serves."""

from dataclasses import dataclass

from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.placement import Shape
from equipoise.demo.observers import Observers
from equipoise.demo.serve import Post
from equipoise.demo.settings import RunSettings
from equipoise.demo.traffic import Traffic
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric


@dataclass(frozen=True)
class Site:
    """All that outlives a pass on one rank."""

    settings: RunSettings
    accelerator: Accelerator
    fabric: Fabric
    post: Post
    traffic: Traffic
    observers: Observers
    layout: Layout | None
    """What was given to be served unchanged; None where nothing was."""

    def shape(self, slots: int) -> Shape:
        """Of the model in so many slots."""
        config = self.post.weights.config
        return Shape(config.layers, config.experts, slots, self.post.ranks)
