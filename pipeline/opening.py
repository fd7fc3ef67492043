"""Edges are opened by both ends alike, or not at all."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import ChannelError, ShapeClassError
from equipoise.hal.stream import Stream
from equipoise.pipeline.edge import Edge, Slices


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an end of an edge is: what a rank has anyway.

    Attributes:
        fabric: opens the edge's communicator; its control plane carries the agreement.
        accelerator: whose memory the tensors are in.
        stream: whose programs make what is sent, or read what is received.
        deadline: seconds that any wait may last.
        slices: the ranks that hold the same sliced tensors; None where nothing is sliced.
    """

    fabric: Fabric
    accelerator: Accelerator
    stream: Stream
    deadline: float
    slices: Slices | None = None


def open_edge(
    name: str, ends: tuple[int, int], place: Place, depth: int, said: Mapping[str, object]
) -> Edge:
    """This rank's end of an edge with a communicator of its own; collective of the two ranks.

    Args:
        name: no two edges of a run have one name.
        ends: ranks of the run: who sends, and who receives.
        place: of this rank's end.
        depth: buffers at each end.
        said: what else both ends must say alike; JSON.

    Raises:
        ChannelError: this rank is neither end, or both.
        ShapeClassError: the other end says something else; on both, before anything is sent.
        BallotIncomplete: the other end did not come by the deadline.
        CommunicatorFailed: neither did it to the communicator.
    """
    rank = place.fabric.control.rank
    if rank not in ends or ends[0] == ends[1]:
        raise ChannelError(f"{name}: rank {rank} cannot be an end of the edge {ends}")
    parts = place.slices.parts if place.slices is not None else 1
    _agree(name, ends, place, {**said, "ends": ends, "depth": depth, "parts": parts})
    communicator = place.fabric.open(f"channel {name}", ends)
    communicator.warm([(0, 1)])
    return Edge(
        name=name,
        communicator=communicator,
        peer=1 - ends.index(rank),
        accelerator=place.accelerator,
        stream=place.stream,
        deadline=place.deadline,
        depth=depth,
        slices=place.slices,
    )


def _agree(name: str, ends: tuple[int, int], place: Place, said: Mapping[str, object]) -> None:
    control, question = place.fabric.control, f"channel/{name}"
    mine = json.dumps(said, sort_keys=True).encode()
    control.cast(question, mine)
    for rank, theirs in zip(ends, control.collect(question, place.deadline, ends), strict=True):
        if theirs != mine:
            raise ShapeClassError(
                f"{name}: rank {rank} opens it with {theirs.decode()}, rank {control.rank} with "
                f"{mine.decode()}"
            )
