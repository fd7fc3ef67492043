"""Channels with one behaviour broken each, and the property that must reject each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from exploration.channel.case import Fault

from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work
from equipoise.pipeline import intermediate_tensors
from equipoise.pipeline.channel.buffers import TrackedBuffer
from equipoise.pipeline.channel.edge import Edge, SliceGroup
from equipoise.pipeline.channel.gather import Completion, GatherSpec, gather, gather_specs
from equipoise.pipeline.channel.recv import (
    HostRecvHandle,
    PendingMessage,
    Posted,
    ReceivingEnd,
    RecvBuffer,
    StreamRecvHandle,
)
from equipoise.pipeline.channel.send import SendBuffer, SendingEnd
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors

Patch = tuple[Any, str, Any]
"""An object, one of its names, and what stands there instead."""


@dataclass(frozen=True)
class Mutant:
    """One broken behaviour.

    Attributes:
        name: words with hyphens, unique.
        broken: what it does instead, in one sentence.
        property: the property that must reject it.
        patches: what is broken.
        faults: what may go wrong in the cases among which it is looked for.
    """

    name: str
    broken: str
    property: str
    patches: Sequence[Patch] = field(hash=False)
    faults: tuple[Fault, ...] = (Fault.NONE,)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """While it is in place."""
        before = [(at, name, getattr(at, name)) for at, name, _ in self.patches]
        for at, name, other in self.patches:
            setattr(at, name, other)
        try:
            yield
        finally:
            for at, name, healthy in before:
                setattr(at, name, healthy)


LEAVE = SendingEnd._pack_and_send
CHECK = PendingMessage.check_headers
OUTCOME = intermediate_tensors._outcome
REPLACE = TrackedBuffer._replace


def nothing(*_: object) -> None:
    """Stands for what is left out."""


def always(_: object) -> bool:
    return True


def leave_beside(end: Any, *arguments: Any) -> None:
    """Packs on another stream, which the edge's does not wait for."""
    end._edge.accelerator.stream(Role.AUX).launch(partial(LEAVE, end, *arguments))


def lent_from_the_last(end: Any, shape_class: Any) -> Any:
    buffer = end._buffers[(end._sequence - 1) % end._edge.depth]
    return buffer.lend_tensors(end._layouts.lookup(shape_class))


def over_when_taken(end: Any, buffer: RecvBuffer) -> bool:
    return not isinstance(buffer.state, Posted)


class LazyGathering:
    """Gathers at the first wait."""

    def __init__(
        self, edge: Edge, slices: SliceGroup, message: Work, parts: Sequence[GatherSpec]
    ) -> None:
        self._begin = partial(gather, edge, slices, message, parts)
        self._completion: Completion | None = None

    def done(self) -> bool:
        return self._now().done()

    def result(self, timeout: float) -> None:
        self._now().result(timeout)

    def wait(self, stream: Stream) -> None:
        self._now().wait(stream)

    def _now(self) -> Completion:
        if self._completion is None:
            self._completion = self._begin()
        return self._completion


def whole_later(buffer: Any, posted: Posted) -> Any:
    edge = buffer._edge
    if edge.slice_group is None or not posted.layout.sliced_fields:
        return posted.work
    parts = gather_specs(posted.layout, buffer._message.memory, buffer._gathered.memory)
    return LazyGathering(edge, edge.slice_group, posted.work, parts)


def without_sequence(message: PendingMessage, headers: Sequence[Sequence[int]]) -> None:
    CHECK(replace(message, sequence=headers[0][1]), headers)


def without_class(message: PendingMessage, headers: Sequence[Sequence[int]]) -> None:
    layout = message.layout
    schema = replace(layout.schema)
    schema.__dict__["digest"] = headers[0][2]
    CHECK(replace(message, layout=replace(layout, schema=schema)), headers)


def own_header_only(message: PendingMessage, headers: Sequence[Sequence[int]]) -> None:
    slices = message.edge.slice_group
    own = slices.rank if slices is not None and len(headers) > 1 else 0
    CHECK(message, headers[own : own + 1])


def forgetful(pending: intermediate_tensors.CommPending) -> Any:
    """Raises without keeping what it raised."""
    outcome = OUTCOME(pending)
    if isinstance(outcome, intermediate_tensors.CommFailed):
        raise type(outcome.error)(*outcome.error.args)
    return outcome


def keeping_let_go(mapping: AsyncIntermediateTensors) -> None:
    """Lets go of nothing that failed."""
    if not isinstance(mapping._state, intermediate_tensors.CommFailed):
        LET_GO(mapping)


LET_GO = AsyncIntermediateTensors._drop_tensors


def fresh_room(buffer: Any, nbytes: int) -> None:
    REPLACE(buffer, nbytes)


def newest(end: Any) -> AsyncIntermediateTensors:
    """Takes the message that was expected last."""
    end._expected_buffers.rotate(1)
    return RECEIVE(end)


RECEIVE = ReceivingEnd.receive
EVERY = tuple(Fault)
MUTANTS = (
    Mutant(
        "buffer-sent-from-again",
        "A step is packed into the next buffer though its last message has not left it",
        "explained",
        [(SendingEnd, "_wait_until_free", nothing), (SendingEnd, "has_free_buffer", always)],
    ),
    Mutant(
        "loan-forgotten",
        "A buffer is packed into though its sender keeps a tensor that it was lent there",
        "lent",
        [(SendBuffer, "borrow_ended", always)],
    ),
    Mutant(
        "lent-elsewhere",
        "A sender is lent the buffer that its last step is sent from",
        "whole",
        [(SendingEnd, "borrow_outputs", lent_from_the_last)],
    ),
    Mutant(
        "packed-beside",
        "A step is packed on another stream, while the next forward writes over it",
        "whole",
        [(SendingEnd, "_pack_and_send", leave_beside)],
    ),
    Mutant(
        "reader-forgotten",
        "A buffer is received into though a tensor refers to it",
        "whole",
        [(ReceivingEnd, "_reading_done", over_when_taken)],
    ),
    Mutant(
        "last-read-overtaken",
        "A buffer is received into though the stream has not passed the last read",
        "whole",
        [(ReceivingEnd, "_order_after", nothing)],
    ),
    Mutant(
        "read-at-once",
        "A read on the host does not wait for the message",
        "whole",
        [(HostRecvHandle, "wait", nothing), (HostRecvHandle, "is_completed", always)],
    ),
    Mutant(
        "stream-unordered",
        "A stream that reads does not wait for the message",
        "whole",
        [(StreamRecvHandle, "wait", nothing)],
    ),
    Mutant(
        "gathered-at-first-read",
        "Slices are gathered at the first read, in whatever order that is",
        "ends",
        [(RecvBuffer, "_completion", whole_later)],
    ),
    Mutant(
        "taken-in-another-order",
        "The message that was expected last is taken first",
        "read",
        [(ReceivingEnd, "receive", newest)],
    ),
    Mutant(
        "buffer-for-every-message",
        "Memory is made for every message",
        "steady",
        [(TrackedBuffer, "reserve", fresh_room)],
    ),
    Mutant(
        "sequence-unchecked",
        "The number of a message is not checked",
        "whole",
        [(PendingMessage, "check_headers", without_sequence)],
        EVERY,
    ),
    Mutant(
        "class-unchecked",
        "The schema of a message is not checked",
        "whole",
        [(PendingMessage, "check_headers", without_class)],
        EVERY,
    ),
    Mutant(
        "own-header-only",
        "A rank looks at the header of its own slice and trusts the others'",
        "whole",
        [(PendingMessage, "check_headers", own_header_only)],
        EVERY,
    ),
    Mutant(
        "never-settled",
        "Headers that a stream copied to the host are never checked",
        "whole",
        [(StreamRecvHandle, "verify", nothing)],
        EVERY,
    ),
    Mutant(
        "failure-forgotten",
        "A read that has failed waits again at the next",
        "again",
        [(intermediate_tensors, "_outcome", forgetful)],
        EVERY,
    ),
    Mutant(
        "failed-and-held",
        "A mapping that has failed keeps its buffer as long as its error is kept",
        "ends",
        [(AsyncIntermediateTensors, "_drop_tensors", keeping_let_go)],
        EVERY,
    ),
)
"""Each must be rejected by its property."""
