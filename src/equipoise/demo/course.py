"""How a rank serves as a stage of a pipeline."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from equipoise.demo.grid import Grid
from equipoise.demo.model import MoeLayer
from equipoise.demo.requests import capacity, most_rows
from equipoise.demo.site import Site
from equipoise.demo.sliced import SlicedMoe
from equipoise.demo.traffic import Traffic
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.stream import Stream
from equipoise.pipeline.edge import Slices
from equipoise.pipeline.opening import Place
from equipoise.pipeline.shape_class import Split
from equipoise.pipeline.stage import Ends
from equipoise.pipeline.stage_ends import Pipeline, open_ends
from equipoise.pipeline.template import RowField, Template

HIDDEN = "hidden"


@dataclass(frozen=True)
class Course:
    """How a rank serves as a stage.

    Attributes:
        grid: who does what.
        rank: this one, of the run.
        micro_batches: into which a step's requests are divided, and so turns in flight.
        ends: of its edges.
        accelerator: makes events.
        slices: ranks that serve the same requests; None where there is one.
    """

    grid: Grid
    rank: int
    micro_batches: int
    ends: Ends
    accelerator: Accelerator
    slices: Communicator | None

    def sliced(self, moe: MoeLayer, compute: Stream) -> MoeLayer:
        """Experts as this rank asks for them: for a slice of its rows, where others have them."""
        return moe if self.slices is None else SlicedMoe(moe, self.slices, compute)

    @property
    def desk_count(self) -> int:
        """Among how many desks the requests of a step are divided."""
        return self.grid.data * self.micro_batches

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.grid.stage(self.rank) == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples tokens."""
        return self.grid.stage(self.rank) == self.grid.stages - 1


def pipeline_of(
    grid: Grid, rank: int, traffic: Traffic, hidden: int, micro_batches: int, name: str
) -> Pipeline:
    """What this rank's column of stages hands over: float32 [rows, hidden].

    Args:
        grid: who does what.
        rank: of the run.
        traffic: says how many rows there can be in one turn.
        hidden: width of the model.
        micro_batches: turns in flight.
        name: no two pipelines of a run have one name.
    """
    desks = grid.data * micro_batches
    sequences = capacity(traffic, desks)
    split = Split.SLICED if grid.tensor > 1 else Split.WHOLE
    field = RowField(HIDDEN, (hidden,), torch.float32, split)
    return Pipeline(
        name=f"{name} {rank % grid.per_stage}",
        ranks=grid.column(rank),
        handed=Template((field,), most=most_rows(traffic, desks)),
        sequences=sequences,
        in_flight=micro_batches,
        depth=micro_batches + 1,
    )


@contextmanager
def course(site: Site, name: str) -> Iterator[Course]:
    """The rank's way through a pass, with its edges and communicators; collective of all ranks."""
    grid, rank, turns = site.grid, site.rank, site.settings.turns
    members = grid.slices(rank)
    opened = [
        site.run.open(f"{name}.{purpose} of {members[0]}", members)
        for purpose in ("gathering", "comparing", "rows")
        if grid.tensor > 1
    ]
    place = Place(
        fabric=site.run,
        accelerator=site.accelerator,
        stream=site.post.compute,
        deadline=site.post.deadline,
        slices=Slices(opened[0], opened[1]) if opened else None,
    )
    hidden = site.weights.config.hidden
    pipeline = pipeline_of(grid, rank, site.traffic, hidden, turns, f"{name}, column")
    ends = open_ends(pipeline, place)
    yield Course(grid, rank, turns, ends, site.accelerator, opened[2] if opened else None)
    ends.close()
    for communicator in opened:
        communicator.close()
