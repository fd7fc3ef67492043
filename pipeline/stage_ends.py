"""The edges of a pipeline: from every stage to the next, and for tokens back to the first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from equipoise.hal.errors import ChannelError
from equipoise.pipeline.channel import ChannelPlan, open_receiver, open_sender
from equipoise.pipeline.opening import Place
from equipoise.pipeline.stage import TOKENS, Ends
from equipoise.pipeline.template import RowField, Template


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What all stages of one pipeline say alike.

    Attributes:
        name: no two pipelines of a run have one name.
        ranks: of the run, one a stage, in the order of stages.
        handed: what one stage hands to the next.
        sequences: that a token is sampled for in one turn, at most.
        in_flight: turns under way at once.
        depth: buffers at each end of an edge between stages; as many as there are turns in flight
            keep a stage from waiting.
    """

    name: str
    ranks: tuple[int, ...]
    handed: Template
    sequences: int
    in_flight: int
    depth: int

    def stage_of(self, rank: int) -> int:
        """Which stage a rank is. Raises `ChannelError` where it is none."""
        if rank not in self.ranks:
            raise ChannelError(f"{self.name}: rank {rank} is not one of its stages {self.ranks}")
        return self.ranks.index(rank)

    def edges(self) -> Sequence[tuple[int, int, ChannelPlan]]:
        """Every edge, from stage to stage, in the order in which they are opened."""
        stages = range(len(self.ranks) - 1)
        onward = [self._plan(at, at + 1, self.handed, self.depth) for at in stages]
        if not onward:
            return ()
        tokens = Template((RowField(TOKENS, (), torch.int64),), self.sequences)
        return (*onward, self._plan(len(self.ranks) - 1, 0, tokens, self.in_flight))

    def _plan(
        self, at: int, to: int, template: Template, depth: int
    ) -> tuple[int, int, ChannelPlan]:
        plan = ChannelPlan(
            name=f"{self.name}: {'tokens of ' * (to == 0)}stage {at} to {to}",
            source=self.ranks[at],
            destination=self.ranks[to],
            template=template,
            depth=depth,
        )
        return at, to, plan


def open_ends(pipeline: Pipeline, place: Place) -> Ends:
    """This rank's ends of the pipeline's edges; collective of all of its stages.

    Every rank opens its edges in the one order of all edges, so no two wait for each other.

    Raises what `open_edge` raises.
    """
    stage, ends = pipeline.stage_of(place.fabric.control.rank), Ends()
    whole = replace(place, slices=None)
    for at, to, plan in pipeline.edges():
        if to == 0 and stage in (at, to):
            opened = open_sender(plan, whole) if stage == at else open_receiver(plan, whole)
            ends = replace(ends, sampled=opened)
        elif stage == at:
            ends = replace(ends, after=open_sender(plan, place))
        elif stage == to:
            ends = replace(ends, before=open_receiver(plan, place))
    return ends
