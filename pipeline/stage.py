"""Pipeline parallelism: what one stage computes per micro-batch, and the loop that drives it.

Several micro-batches are in flight at once, so that all stages compute at the same time. They are
numbered over all steps: number t + `in_flight` is the same micro-batch as t, one step later, and
needs the tokens that t sampled, which the last stage sends back to the first.

The channels of a pipeline lead from every stage to the next, and from the last back to the first.
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
"""Name of the tensor that the last stage sends back: one token id per sequence."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one step; the same on every stage.

    Attributes:
        number: micro-batches before it, over all steps.
        rows: rows of the tensors that one stage sends to the next.
        sequences: number of sequences that a token is sampled for.
    """

    number: int
    rows: int
    sequences: int


class Stage(Protocol):
    """The part of a model that one rank computes.

    The host calls `begin` and `end`, a program of the stage's stream calls `forward`; each once per
    micro-batch, in order. `end` of number t is called before `begin` of number t + `in_flight`.
    """

    def begin(self, number: int) -> MicroBatch:
        """Prepare a micro-batch; by now every stage knows how many rows it has."""
        ...

    def around(self, number: int) -> AbstractContextManager[object]:
        """Return a context that the host enters while it launches the micro-batch."""
        ...

    def forward(
        self, micro_batch: MicroBatch, inputs: AsyncIntermediateTensors | None
    ) -> Mapping[str, Tensor]:
        """Compute the outputs from the inputs, which are None on the first stage.

        On the last stage the outputs are `SAMPLED_TOKENS`, int64 [micro_batch.sequences].
        """
        ...

    def end(self, micro_batch: MicroBatch, tokens: Tensor | None) -> None:
        """Called when the micro-batch is complete on this stage.

        Args:
            micro_batch: the micro-batch.
            tokens: int64 [micro_batch.sequences], the sampled tokens, on the first and the last
                stage; their memory is reused when this returns.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StageChannels:
    """The channel ends of one stage.

    Attributes:
        from_previous: from the previous stage; None on the first.
        to_next: to the next stage; None on the last.
        tokens: sampled tokens from the last stage to the first: the receiver on the first, the
            sender on the last, None on others and if there is one stage only.
    """

    from_previous: Receiver | None = None
    to_next: Sender | None = None
    tokens: Receiver | Sender | None = None

    def close(self) -> None:
        """Close all ends. Raises as `Sender.close` and `Receiver.close`."""
        for end in (self.from_previous, self.to_next, self.tokens):
            if end is not None:
                end.close()


@dataclass
class _MicroBatchInFlight:
    """A micro-batch in flight, and the tokens that its program sampled."""

    micro_batch: MicroBatch
    done: Event
    tokens: Tensor | None = None


class StageLoop:
    """Runs micro-batches through one stage.

    Args:
        stage: computes.
        ends: the channel ends of the stage.
        accelerator: creates events.
        stream: runs the forward passes.
        in_flight: micro-batches in flight at once; with fewer than stages, some stages idle.
        deadline: seconds that the host waits for the end of a micro-batch.
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
            raise ChannelError(f"{in_flight} micro-batches in flight: expected at least 1")
        self._stage = stage
        self._channels = ends
        self._stream = stream
        self._deadline = deadline
        self._events = [accelerator.event() for _ in range(in_flight)]
        self._post_tokens_ahead = isinstance(ends.tokens, Receiver) and ends.tokens.can_post_ahead
        self._in_flight: deque[_MicroBatchInFlight] = deque()
        self._running = threading.Lock()

    def run(self, count: int) -> None:
        """Run `count` micro-batches, from number 0, to the end of the last.

        Raises:
            StreamFailed: a forward pass failed; the cause says why (a lost stage, for example).
            CommunicatorFailed: tokens did not arrive, or outputs could not be sent.
            MessageMismatch: a stage is out of step.
            ChannelError: the loop is running already, or an earlier run failed.
        """
        if not self._running.acquire(blocking=False):
            raise ChannelError("this stage is running already")
        try:
            self._refuse_leftovers()
            for number in range(count):
                if len(self._in_flight) == len(self._events):
                    self._finish_oldest()
                self._launch(number)
            while self._in_flight:
                self._finish_oldest()
            self._drain()
        finally:
            self._running.release()

    def _refuse_leftovers(self) -> None:
        if self._in_flight:
            raise ChannelError("an error has ended this stage: open its channels again")

    def _launch(self, number: int) -> None:
        micro_batch = self._stage.begin(number)
        in_flight = _MicroBatchInFlight(micro_batch, self._events[number % len(self._events)])
        inputs = self._receive_inputs(micro_batch)
        with self._stage.around(number):
            self._stream.launch(partial(self._compute, in_flight, inputs))
            self._stream.record(in_flight.done)
        self._in_flight.append(in_flight)
        self._expect_tokens(micro_batch, self._post_tokens_ahead)

    def _receive_inputs(self, micro_batch: MicroBatch) -> AsyncIntermediateTensors | None:
        """Return the inputs; their receive is posted before anything is computed."""
        if self._channels.from_previous is None:
            return None
        self._channels.from_previous.expect(micro_batch.rows)
        return self._channels.from_previous.receive()

    def _compute(
        self, in_flight: _MicroBatchInFlight, inputs: AsyncIntermediateTensors | None
    ) -> None:
        """Runs as a program of the stream."""
        outputs = self._stage.forward(in_flight.micro_batch, inputs)
        if self._channels.to_next is not None:
            self._channels.to_next.send(outputs)
        else:
            in_flight.tokens = outputs[SAMPLED_TOKENS]
        if isinstance(self._channels.tokens, Sender):
            self._channels.tokens.send({SAMPLED_TOKENS: outputs[SAMPLED_TOKENS]})
        if inputs is not None:
            inputs.release()  # only now: an output may be a view of an input

    def _expect_tokens(self, micro_batch: MicroBatch, now: bool) -> None:
        """Post the receive of a micro-batch's tokens after its sends.

        As early as possible if communicators are independent. Otherwise they execute operations in
        the order of issue, and a pending receive would block the sends of later micro-batches: then
        it is posted as late as possible.
        """
        if now and isinstance(self._channels.tokens, Receiver):
            self._channels.tokens.expect(micro_batch.sequences)

    def _finish_oldest(self) -> None:
        """Wait for the oldest micro-batch in flight, and end it."""
        in_flight = self._in_flight.popleft()
        self._expect_tokens(in_flight.micro_batch, not self._post_tokens_ahead)
        in_flight.done.synchronize(self._deadline)
        if not isinstance(self._channels.tokens, Receiver):
            self._stage.end(in_flight.micro_batch, in_flight.tokens)
            return
        tokens = self._channels.tokens.receive()
        self._channels.tokens.drain()  # the host reads the tokens, without a stream
        self._stage.end(in_flight.micro_batch, tokens[SAMPLED_TOKENS])
        tokens.release()

    def _drain(self) -> None:
        """Wait until all outputs were sent, and all inputs checked."""
        for end in (self._channels.from_previous, self._channels.to_next, self._channels.tokens):
            if isinstance(end, Receiver) or end is not None:
                end.drain()


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """Parameters of a pipeline; equal on all stages.

    Attributes:
        name: unique among the pipelines of a run.
        ranks: ranks of the run, one per stage, in order.
        template: the tensors that one stage sends to the next.
        max_sequences: most sequences that a token is sampled for in one micro-batch.
        in_flight: micro-batches in flight at once.
        depth: buffers at each end of an edge between stages; with `in_flight` buffers no stage
            waits for one.
    """

    name: str
    ranks: tuple[int, ...]
    template: SchemaTemplate
    max_sequences: int
    in_flight: int
    depth: int

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank. Raises `ChannelError` if it has none."""
        if rank not in self.ranks:
            raise ChannelError(f"{self.name}: rank {rank} is not one of its stages {self.ranks}")
        return self.ranks.index(rank)

    def channel_specs(self) -> Sequence[tuple[int, int, ChannelSpec]]:
        """Return every channel with its source and destination stage, in the order of opening."""
        stages = range(len(self.ranks) - 1)
        onward = [self._plan(source, source + 1, self.template, self.depth) for source in stages]
        if not onward:
            return ()
        tokens = SchemaTemplate((RowField(SAMPLED_TOKENS, (), torch.int64),), self.max_sequences)
        return (*onward, self._plan(len(self.ranks) - 1, 0, tokens, self.in_flight))

    def _plan(
        self, source: int, destination: int, template: SchemaTemplate, depth: int
    ) -> tuple[int, int, ChannelSpec]:
        spec = ChannelSpec(
            name=f"{self.name}: {'tokens of ' * (destination == 0)}stage {source} to {destination}",
            source=self.ranks[source],
            destination=self.ranks[destination],
            template=template,
            depth=depth,
        )
        return source, destination, spec


def open_stage_channels(pipeline: PipelineSpec, context: EdgeContext) -> StageChannels:
    """Open this rank's ends of the pipeline's channels; collective of all stages.

    Every rank opens its channels in the one order of `channel_specs`, so that no two ranks wait for
    each other.

    Raises what `open_edge` raises.
    """
    stage, ends = pipeline.stage_of(context.fabric.control.rank), StageChannels()
    unsliced = replace(context, slice_group=None)
    for source, destination, spec in pipeline.channel_specs():
        if destination == 0 and stage in (source, destination):
            tokens_end = (
                open_sender(spec, unsliced) if stage == source else open_receiver(spec, unsliced)
            )
            ends = replace(ends, tokens=tokens_end)
        elif stage == source:
            ends = replace(ends, to_next=open_sender(spec, context))
        elif stage == destination:
            ends = replace(ends, from_previous=open_receiver(spec, context))
    return ends
