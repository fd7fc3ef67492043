"""Edges are opened by both ends alike, or not at all."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import ChannelError, ShapeClassError
from equipoise.hal.stream import Stream
from equipoise.pipeline.edge import Edge, Slices

_OPENED: "WeakKeyDictionary[Fabric, Counter[str]]" = WeakKeyDictionary()
"""How often each edge was opened: ballots and communicators have a name once."""


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
        name: no two edges that are open have one name. Behind its close an edge may be opened
            again, by both ends.
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
    called = _called(name, place.fabric)
    _agree(called, ends, place, {**said, "ends": ends, "depth": depth, "parts": parts})
    communicator = place.fabric.open(f"channel {called}", ends)
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


def open_second(edge: Edge, ends: tuple[int, int], place: Place) -> Edge:
    """The edge with a communicator for second parts of messages; collective of the two ranks."""
    rest = place.fabric.open(f"{edge.communicator.purpose}, second parts", ends)
    return replace(edge, rest=rest)


def _called(name: str, fabric: Fabric) -> str:
    """The edge's name, and how often it was opened before."""
    opened = _OPENED.setdefault(fabric, Counter())
    opened[name] += 1
    return name if opened[name] == 1 else f"{name}, again {opened[name] - 1}"


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
