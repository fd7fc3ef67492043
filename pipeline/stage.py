"""A stage of a pipeline: what it does in a turn, and the loop that takes turns.

A *turn* is one micro-batch of one step. Several are under way at once, so that every stage has
something to compute while others do: turn t + `in_flight` is the same micro-batch, one step on, and
needs the tokens that turn t has sampled, which come back from the last stage to the first.

The edges of a pipeline: from every stage to the next, and for tokens back to the first.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import ChannelError
from equipoise.hal.stream import Event, Stream
from equipoise.pipeline.channel.edge import EdgeContext
from equipoise.pipeline.channel.endpoints import (
    ChannelSpec,
    Receiver,
    Sender,
    open_receiver,
    open_sender,
)
from equipoise.pipeline.channel.schema import RowField, SchemaTemplate
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors

SAMPLED_TOKENS = "tokens"
"""What the last stage hands back: one number a sequence."""


@dataclass(frozen=True)
class MicroBatch:
    """What is computed in one turn; the same on every stage.

    Attributes:
        number: turns before it.
        rows: of what one stage hands to the next.
        sequences: that a token is sampled for.
    """

    number: int
    rows: int
    sequences: int


class Stage(Protocol):
    """The part of a model that one rank computes.

    `begin` and `end` are called by the host, `forward` by a program of the stage's stream, each
    once a turn and in the order of turns; `end` of a turn comes before `begin` of the one that is
    as many turns behind it as are in flight.
    """

    def begin(self, number: int) -> MicroBatch:
        """Prepare a turn: which rows it has is known by now on every stage."""
        ...

    def around(self, number: int) -> AbstractContextManager[object]:
        """Entered by the host while it launches the turn."""
        ...

    def forward(
        self, turn: MicroBatch, handed: AsyncIntermediateTensors | None
    ) -> Mapping[str, Tensor]:
        """Compute: from what the stage before hands over, None on the first, to what is handed on.

        On the last stage that is `SAMPLED_TOKENS`, int64 [turn.sequences].
        """
        ...

    def end(self, turn: MicroBatch, tokens: Tensor | None) -> None:
        """The turn is over here.

        Args:
            turn: which.
            tokens: int64 [turn.sequences] that it has sampled, on the first and the last stage; in
                memory that is used again when this returns.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StageChannels:
    """The ends of edges that a stage has.

    Attributes:
        from_previous: from the stage before; None on the first.
        to_next: to the one behind; None on the last.
        tokens: tokens, from the last stage to the first; the receiver on the first, the sender on
            the last, None on others, and where there is one stage.
    """

    from_previous: Receiver | None = None
    to_next: Sender | None = None
    tokens: Receiver | Sender | None = None

    def close(self) -> None:
        """Give the edges back. Raises as `Sender.close` and `Receiver.close` do."""
        for end in (self.from_previous, self.to_next, self.tokens):
            if end is not None:
                end.close()


@dataclass
class _MicroBatchInFlight:
    """A turn under way, and what its program leaves."""

    micro_batch: MicroBatch
    done: Event
    tokens: Tensor | None = None


class StageLoop:
    """Takes turns on one rank.

    Args:
        stage: what is computed.
        ends: where it comes from and goes to.
        accelerator: makes events.
        stream: computes.
        in_flight: turns under way at once; with fewer than there are stages some idle.
        deadline: seconds that the host waits for a turn's end.
    """

    def __init__(
        self,
        stage: Stage,
        ends: StageChannels,
        accelerator: Accelerator,
        stream: Stream,
        in_flight: int,
        deadline: float,
    ) -> None:
        if in_flight < 1:
            raise ChannelError(f"{in_flight} turns in flight compute nothing")
        self._stage = stage
        self._channels = ends
        self._stream = stream
        self._deadline = deadline
        self._events = [accelerator.event() for _ in range(in_flight)]
        self._post_tokens_ahead = isinstance(ends.tokens, Receiver) and ends.tokens.can_post_ahead
        self._in_flight: deque[_MicroBatchInFlight] = deque()
        self._taking = threading.Lock()

    def run(self, turns: int) -> None:
        """Take so many turns, from number 0, to the end of the last.

        Raises:
            StreamFailed: a turn's forward failed; its cause says why: a stage that is gone, say.
            CommunicatorFailed: tokens did not come back, or a step could not be handed on.
            MessageMismatch: a stage is out of step.
            ChannelError: the loop is running already.
        """
        if not self._taking.acquire(blocking=False):
            raise ChannelError("this stage takes turns already")
        try:
            self._refuse_leftovers()
            for number in range(turns):
                if len(self._in_flight) == len(self._events):
                    self._finish_oldest()
                self._launch(number)
            while self._in_flight:
                self._finish_oldest()
            self._drain()
        finally:
            self._taking.release()

    def _refuse_leftovers(self) -> None:
        if self._in_flight:
            raise ChannelError("an error has ended this stage's turns: open its edges anew")

    def _launch(self, number: int) -> None:
        turn = self._stage.begin(number)
        launched = _MicroBatchInFlight(turn, self._events[number % len(self._events)])
        handed = self._receive_inputs(turn)
        with self._stage.around(number):
            self._stream.launch(partial(self._compute, launched, handed))
            self._stream.record(launched.done)
        self._in_flight.append(launched)
        self._expect_tokens(turn, self._post_tokens_ahead)

    def _receive_inputs(self, turn: MicroBatch) -> AsyncIntermediateTensors | None:
        """What the stage before hands over; its receive is posted before anything is computed."""
        if self._channels.from_previous is None:
            return None
        self._channels.from_previous.expect(turn.rows)
        return self._channels.from_previous.receive()

    def _compute(
        self, launched: _MicroBatchInFlight, handed: AsyncIntermediateTensors | None
    ) -> None:
        """A program of the stream."""
        made = self._stage.forward(launched.micro_batch, handed)
        if self._channels.to_next is not None:
            self._channels.to_next.send(made)
        else:
            launched.tokens = made[SAMPLED_TOKENS]
        if isinstance(self._channels.tokens, Sender):
            self._channels.tokens.send({SAMPLED_TOKENS: made[SAMPLED_TOKENS]})
        if handed is not None:
            handed.release()  # not before: what is handed on may lie where it came

    def _expect_tokens(self, turn: MicroBatch, now: bool) -> None:
        """Post the receive of a turn's tokens: behind what it sends, and as early as that allows.

        Where communicators take turns in the order in which they are given operations, tokens that
        are awaited would keep back what later turns send; there it is as late as it can be.
        """
        if now and isinstance(self._channels.tokens, Receiver):
            self._channels.tokens.expect(turn.sequences)

    def _finish_oldest(self) -> None:
        """The oldest turn under way comes to its end."""
        launched = self._in_flight.popleft()
        self._expect_tokens(launched.micro_batch, not self._post_tokens_ahead)
        launched.done.synchronize(self._deadline)
        if not isinstance(self._channels.tokens, Receiver):
            self._stage.end(launched.micro_batch, launched.tokens)
            return
        back = self._channels.tokens.receive()
        self._channels.tokens.drain()  # the host reads them, on no stream in particular
        self._stage.end(launched.micro_batch, back[SAMPLED_TOKENS])
        back.release()

    def _drain(self) -> None:
        """Everything that was handed on has arrived, and what came was what was expected."""
        for end in (self._channels.from_previous, self._channels.to_next, self._channels.tokens):
            if isinstance(end, Receiver) or end is not None:
                end.drain()


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """What all stages of one pipeline say alike.

    Attributes:
        name: no two pipelines of a run have one name.
        ranks: of the run, one a stage, in the order of stages.
        template: what one stage hands to the next.
        max_sequences: that a token is sampled for in one turn, at most.
        in_flight: turns under way at once.
        depth: buffers at each end of an edge between stages; as many as there are turns in flight
            keep a stage from waiting.
    """

    name: str
    ranks: tuple[int, ...]
    template: SchemaTemplate
    max_sequences: int
    in_flight: int
    depth: int

    def stage_of(self, rank: int) -> int:
        """Which stage a rank is. Raises `ChannelError` where it is none."""
        if rank not in self.ranks:
            raise ChannelError(f"{self.name}: rank {rank} is not one of its stages {self.ranks}")
        return self.ranks.index(rank)

    def channel_specs(self) -> Sequence[tuple[int, int, ChannelSpec]]:
        """Every edge, from stage to stage, in the order in which they are opened."""
        stages = range(len(self.ranks) - 1)
        onward = [self._plan(at, at + 1, self.template, self.depth) for at in stages]
        if not onward:
            return ()
        tokens = SchemaTemplate((RowField(SAMPLED_TOKENS, (), torch.int64),), self.max_sequences)
        return (*onward, self._plan(len(self.ranks) - 1, 0, tokens, self.in_flight))

    def _plan(
        self, at: int, to: int, template: SchemaTemplate, depth: int
    ) -> tuple[int, int, ChannelSpec]:
        plan = ChannelSpec(
            name=f"{self.name}: {'tokens of ' * (to == 0)}stage {at} to {to}",
            source=self.ranks[at],
            destination=self.ranks[to],
            template=template,
            depth=depth,
        )
        return at, to, plan


def open_stage_channels(pipeline: PipelineSpec, place: EdgeContext) -> StageChannels:
    """This rank's ends of the pipeline's edges; collective of all of its stages.

    Every rank opens its edges in the one order of all edges, so no two wait for each other.

    Raises what `open_edge` raises.
    """
    stage, ends = pipeline.stage_of(place.fabric.control.rank), StageChannels()
    whole = replace(place, slice_group=None)
    for at, to, plan in pipeline.channel_specs():
        if to == 0 and stage in (at, to):
            opened = open_sender(plan, whole) if stage == at else open_receiver(plan, whole)
            ends = replace(ends, tokens=opened)
        elif stage == at:
            ends = replace(ends, to_next=open_sender(plan, place))
        elif stage == to:
            ends = replace(ends, from_previous=open_receiver(plan, place))
    return ends
