"""One stage of `pipeline.py`, as a process: serves every run in turn, and writes down when.

Told what to do on standard input, in JSON; writes a line of JSON that says what the link is, and
one for each run.
"""

import ctypes
import gc
import json
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, distributed

from equipoise.hal import registry
from equipoise.hal.communicator import Fabric, Rendezvous
from equipoise.hal.stream import Role
from equipoise.pipeline.channel.edge import EdgeContext
from equipoise.pipeline.channel.schema import RowField, SchemaTemplate
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors
from equipoise.pipeline.stage import (
    SAMPLED_TOKENS,
    MicroBatch,
    PipelineSpec,
    StageLoop,
    open_stage_channels,
)
from lib.emulated_device import Clock, now, prompt_timers
from lib.handovers import (
    DTYPE,
    PREPARE,
    Activations,
    Batch,
    Blocking,
    Coordinator,
    Handle,
    Point,
    Station,
    Wire,
    Wires,
    in_flight,
    message_bytes,
)
from lib.stamps import stamp, wrong


class Compute:
    """Timed waits, by one thread.

    The system wakes a thread some 60 microseconds late, which a device does not. So the clock of
    compute advances by what it is asked for, and by what the thread does or waits for between two
    waits; not by how late it was woken, nor by stamps, nor by what the host does to send tokens
    back.

    Args:
        station: where.

    Attributes:
        began, ended: instants of every micro-batch.
        wrong: words that were not what they should be.
        cpu: seconds of the processor.
    """

    def __init__(self, station: Station) -> None:
        self._station = station
        self._clock = Clock()
        self._woken = 0.0
        self.start_times: list[float] = []
        self.end_times: list[float] = []
        self.wrong = 0
        self.cpu = 0.0

    def _compute_on(self, batch: Batch, read: Callable[[], Activations]) -> None:
        """The host's preparation, the wait for activations, and what is computed on them."""
        self._spend(PREPARE * batch.seconds)
        activations = read()
        self._beside(lambda: self._look(activations, batch))
        self._spend((1.0 - PREPARE) * batch.seconds)

    def _look(self, activations: Activations, batch: Batch) -> None:
        for which, tensor in enumerate(activations):
            self.wrong += wrong(tensor, batch.step, self._station.rank - 1, which)

    def _stamp(self, output: Activations, batch: Batch) -> None:
        for which, tensor in enumerate(output):
            stamp(tensor, batch.step, self._station.rank, which)

    def _beside(self, work: Callable[[], None]) -> None:
        """What takes place within the time of compute: it is the same for all, and not judged."""
        began = now()
        work()
        self._woken += now() - began

    def _spend(self, seconds: float) -> None:
        """Compute: a timed wait, behind whatever the host did or waited for since the last one."""
        self._clock.free += now() - self._woken
        self._clock.spend(seconds)
        self._woken = now()


SAMPLED = 7
"""Which tensor of a step, for stamps."""


class TokenReturn:
    """Sampled tokens on their way from the last stage to the first: a stage between does nothing.

    Receives are posted when a micro-batch sets out, sends are waited for when their tensor is used
    again. With blocking sends here the blocking hand-over could have one micro-batch in flight
    only: the last stage would wait for a first one that waits for it.
    """

    def take(self) -> int:
        """Nothing."""
        return 0

    def expect(self, batch: Batch) -> None:
        """Nothing."""

    def deliver(self, batch: Batch) -> None:
        """Nothing."""

    def drain(self) -> int:
        """Nothing."""
        return 0


class FirstStageTokens(TokenReturn):
    """Begins a step with the tokens of the one so many before: the same micro-batch's."""

    def __init__(self, station: Station) -> None:
        self._wire = station.wires.open("tokens")
        self._last = station.ranks - 1
        self._buffers = torch.empty(station.in_flight, station.most, dtype=torch.int64)
        self._expected: list[tuple[Batch, Handle]] = []

    def take(self) -> int:
        """See `TokenReturn`."""
        return self._oldest() if len(self._expected) == len(self._buffers) else 0

    def expect(self, batch: Batch) -> None:
        """See `TokenReturn`."""
        into = self._buffers[batch.step % len(self._buffers), : batch.rows]
        self._expected.append((batch, self._wire.irecv(into, self._last)))

    def drain(self) -> int:
        """See `TokenReturn`."""
        return sum(self._oldest() for _ in list(self._expected))

    def _oldest(self) -> int:
        batch, handle = self._expected.pop(0)
        handle.result()
        tokens = self._buffers[batch.step % len(self._buffers), : batch.rows]
        return wrong(tokens, batch.step, self._last, SAMPLED)


class LastStageTokens(TokenReturn):
    """Samples a token a row, at the end of every step."""

    def __init__(self, station: Station) -> None:
        self._wire = station.wires.open("tokens")
        self._rank = station.rank
        self._buffers = torch.empty(station.in_flight, station.most, dtype=torch.int64)
        self._handles: list[Handle] = []

    def deliver(self, batch: Batch) -> None:
        """See `TokenReturn`."""
        count = len(self._buffers)
        if len(self._handles) == count:
            self._handles.pop(0).result()
        tokens = self._buffers[batch.step % count, : batch.rows]
        stamp(tokens, batch.step, self._rank, SAMPLED)
        self._handles.append(self._wire.isend(tokens, 0))

    def drain(self) -> int:
        """See `TokenReturn`."""
        while self._handles:
            self._handles.pop(0).result()
        return 0


class MiddleStageTokens(TokenReturn):
    """Opens the wire, as every rank has to."""

    def __init__(self, station: Station) -> None:
        station.wires.open("tokens")


def token_return(station: Station) -> TokenReturn:
    """This stage's part."""
    if station.is_first:
        return FirstStageTokens(station)
    return LastStageTokens(station) if station.is_last else MiddleStageTokens(station)


class Stage(Compute):
    """Serves one run.

    Args:
        station: where.
        handover: how activations come and go.
        tokens: how sampled tokens return.
    """

    def __init__(
        self, station: Station, handover: Blocking | Coordinator, tokens: TokenReturn
    ) -> None:
        super().__init__(station)
        self.messages = handover.messages
        self._handover = handover
        self._tokens = tokens

    def run(self, batches: list[Batch]) -> None:
        """Every micro-batch, in order, until all has arrived everywhere."""
        cpu_start = time.process_time()
        self._clock.free = self._woken = now()
        for batch in batches:
            self._step(batch)
        self._handover.drain()
        self.wrong += self._tokens.drain()
        self.cpu = time.process_time() - cpu_start

    def _step(self, batch: Batch) -> None:
        self._handover.begin(batch)
        self.wrong += self._tokens.take()
        self._beside(lambda: self._tokens.expect(batch))
        self.start_times.append(now())
        if self._station.is_first:
            self._spend(batch.seconds)
        else:
            self._compute_on_what_comes(batch)
        self.end_times.append(now())
        if self._station.is_last:
            self._beside(lambda: self._tokens.deliver(batch))
        else:
            self._send(batch)

    def _compute_on_what_comes(self, batch: Batch) -> None:
        received = self._handover.receive(batch)
        self._compute_on(batch, received.read)
        received.release()

    def _send(self, batch: Batch) -> None:
        output = self._handover.outgoing(batch)
        self._beside(lambda: self._stamp(output, batch))
        self._handover.send(batch, output)


class HostAheadStage(Compute):
    """Serves one run by the coordinator's pattern, with a host that runs ahead of its device.

    Args:
        station: where.
        handover: how activations come and go.
        tokens: how sampled tokens return.
    """

    def __init__(self, station: Station, handover: Coordinator, tokens: TokenReturn) -> None:
        super().__init__(station)
        self.messages = handover.messages
        self._handover = handover
        self._tokens = tokens
        self._stream = station.accelerator.stream(Role.COMPUTE)

    def run(self, batches: list[Batch]) -> None:
        """Every micro-batch, in order, until all has arrived everywhere."""
        cpu_start = time.process_time()
        self._clock.free = self._woken = now()
        metadata: deque[Handle] = deque()
        wrong_tokens = 0  # the stream counts in `wrong` meanwhile
        for batch in batches:
            wrong_tokens += self._tokens.take()
            self._tokens.expect(batch)
            tensors = {} if self._station.is_first else self._handover.receive_metadata()
            self._stream.launch(partial(self._step, batch, tensors))
            if not self._station.is_last:
                metadata.extend(self._handover.send_metadata(self._handover.outgoing(batch)))
                while len(metadata) > 2 * self._station.in_flight:
                    metadata.popleft().result()
        self._stream.synchronize(self._station.deadline)
        for handle in metadata:
            handle.result()
        self._handover.drain()
        self.wrong += wrong_tokens + self._tokens.drain()
        self.cpu = time.process_time() - cpu_start

    def _step(self, batch: Batch, tensors: dict[str, Tensor]) -> None:
        """What the device does for one step."""
        self._handover.drain()
        self.start_times.append(now())
        if self._station.is_first:
            self._spend(batch.seconds)
        else:
            self._compute_on(batch, self._handover.receive_tensors(tensors).read)
        self.end_times.append(now())
        if self._station.is_last:
            self._beside(lambda: self._tokens.deliver(batch))
        else:
            output = self._handover.outgoing(batch)
            self._beside(lambda: self._stamp(output, batch))
            self._handover.send_tensors(output)


FIELDS = ("hidden", "residual")


class LoopedStage(Compute):
    """Serves one run; see `equipoise.pipeline.stage.Stage`.

    Args:
        station: where.
    """

    def __init__(self, station: Station) -> None:
        super().__init__(station)
        self.messages = 1
        rank, last = station.rank, station.ranks - 1
        self._stream = station.accelerator.stream(Role.COMPUTE)
        self._from_last = last
        place = EdgeContext(
            fabric=station.fabric,
            accelerator=station.accelerator,
            stream=self._stream,
            deadline=station.deadline,
        )
        self._ends = open_stage_channels(self._pipeline(), place)
        self._sampled = torch.empty(station.most, dtype=torch.int64)
        self._batches: list[Batch] = []
        self._rank = rank

    def run(self, batches: list[Batch]) -> None:
        """Every micro-batch, in order, until all has arrived everywhere."""
        station, self._batches = self._station, batches
        loop = StageLoop(
            self,
            self._ends,
            station.accelerator,
            self._stream,
            station.in_flight,
            station.deadline,
        )
        cpu_start = time.process_time()
        self._clock.free = self._woken = now()
        loop.run(len(batches))
        self.cpu = time.process_time() - cpu_start
        self._ends.close()

    def begin(self, number: int) -> MicroBatch:
        """The schedule has told how many rows it has."""
        rows = self._batches[number].rows
        return MicroBatch(number, rows, rows)

    def around(self, number: int) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    def forward(
        self, turn: MicroBatch, handed: AsyncIntermediateTensors | None
    ) -> Mapping[str, Tensor]:
        """A step's compute, around the wait for what it computes on."""
        batch = self._batches[turn.number]
        self.start_times.append(now())
        if handed is None:
            self._spend(batch.seconds)
        else:
            self._compute_on(batch, lambda: Activations(*(handed[name] for name in FIELDS)))
        self.end_times.append(now())
        if self._station.is_last:
            tokens = self._sampled[: batch.rows]
            self._beside(lambda: stamp(tokens, batch.step, self._rank, SAMPLED))
            return {SAMPLED_TOKENS: tokens}
        assert self._ends.to_next is not None
        buffers = self._ends.to_next.borrow_outputs(batch.rows)  # computed where it is sent from
        output = Activations(*(buffers[name] for name in FIELDS))
        self._beside(lambda: self._stamp(output, batch))
        return dict(zip(FIELDS, output, strict=True))

    def end(self, turn: MicroBatch, tokens: Tensor | None) -> None:
        """The first stage has the tokens of the step."""
        if tokens is not None and self._station.is_first:
            self.wrong += wrong(tokens, turn.number, self._from_last, SAMPLED)

    def _pipeline(self) -> PipelineSpec:
        station = self._station
        fields = tuple(RowField(name, (station.hidden,), DTYPE) for name in FIELDS)
        return PipelineSpec(
            name=station.label,
            ranks=tuple(range(station.ranks)),
            template=SchemaTemplate(fields, station.most),
            max_sequences=station.most,
            in_flight=station.in_flight,
            depth=station.in_flight + 1,
        )


BLOCKING, COORDINATOR, HOST_AHEAD, OURS = "blocking", "coordinator", "host ahead", "channel"
CONTESTANTS: dict[str, Callable[[Station], Stage | HostAheadStage | LoopedStage]] = {
    BLOCKING: lambda station: Stage(station, Blocking(station), token_return(station)),
    COORDINATOR: lambda station: Stage(station, Coordinator(station), token_return(station)),
    HOST_AHEAD: lambda station: HostAheadStage(
        station, Coordinator(station), token_return(station)
    ),
    OURS: LoopedStage,
}
"""Every rank makes the one that is named, anew for each run and at the same time as all others."""


PAUSE = 1e-3
"""Seconds between two messages."""
UNTIMED, SHORT, LONG = 3, 41, 7
"""Messages that are not timed; that are, of few and of many bytes. Medians are taken."""
SHORTEST = 1e-6
"""Seconds that no message is quicker than."""
FEW, MANY = 8, 16 << 20
"""Bytes of a message that shows latency, and of one that shows the rate."""


@dataclass(frozen=True)
class LinkFigures:
    """Medians.

    Attributes:
        latency: seconds, one way, of 8 bytes.
        rate: bytes per second of 16 MiB, one way, beside that latency.
    """

    latency: float
    rate: float

    def fields(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


class Gauge:
    """Times messages between ranks 0 and 1; every rank may hold one, these two have to.

    Args:
        wire: that has nothing in flight.
        rank: this one.
    """

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._word = torch.zeros(FEW, dtype=torch.uint8)

    def link(self) -> LinkFigures:
        """Latency and rate. Both ranks call it, and the first one's figures hold."""
        latency = self._median(SHORT, self._there_and_back) / 2
        seconds = self._one_way(MANY, latency) - latency
        return LinkFigures(latency, MANY / max(seconds, SHORTEST))

    def transfer(self, nbytes: int) -> float:
        """Seconds, one way, of a message of so many bytes, both sides ready for it."""
        latency = self._median(SHORT, self._there_and_back) / 2
        return self._one_way(nbytes, latency)

    def _one_way(self, nbytes: int, latency: float) -> float:
        blob = torch.zeros(nbytes, dtype=torch.uint8)
        return max(latency, self._median(LONG, lambda: self._there(blob)) - latency)

    def _median(self, times: int, message: Callable[[], None]) -> float:
        durations = []
        for turn in range(UNTIMED + times):
            time.sleep(PAUSE)  # as behind a stage's compute: caches and cores have cooled down
            began = now()
            message()
            if turn >= UNTIMED:
                durations.append(now() - began)
        return statistics.median(durations)

    def _there_and_back(self) -> None:
        self._there(self._word)

    def _there(self, blob: Tensor) -> None:
        """The blob one way, 8 bytes the other; the one who waits for a blob is ready before."""
        if self._rank == 0:
            answer = self._wire.irecv(self._word.clone(), 1)
            self._wire.isend(blob, 1).result()
            answer.result()
        else:
            self._wire.irecv(blob, 0).result()
            self._wire.isend(self._word, 0).result()


PR_SET_PDEATHSIG = 1


class Rank:
    """What lasts for all runs.

    Args:
        where: to meet the others.
    """

    def __init__(self, where: Rendezvous) -> None:
        self.where = where
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            where.host, where.port, None, False, timedelta(seconds=where.deadline)
        )
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore("others", store),  # type: ignore[attr-defined]
            rank=where.rank,
            world_size=where.size,
            timeout=timedelta(seconds=where.deadline),
        )
        self._fabric: Fabric = registry.communicator("gloo").connect(where)
        self._wires = Wires(where.deadline)
        self._accelerator = registry.accelerator("cpu").open(0)
        self._turns = self._fabric.open("turns")

    def gauge(self, sizes: Iterable[int]) -> dict[str, Any]:
        """What the link is: latency, rate, and seconds of messages of these sizes, by size.

        Every rank is told what the first one has measured.
        """
        wire = self._wires.open("gauge")
        figures: list[dict[str, Any]] = [{}]
        if self.where.rank < 2:
            gauge = Gauge(wire, self.where.rank)
            link = gauge.link()
            figures = [{**link.fields(), "seconds": [[n, gauge.transfer(n)] for n in sizes]}]
        distributed.broadcast_object_list(figures, src=0)
        return figures[0]

    def run(
        self, point: Point, system: str, label: str, seconds: dict[int, float]
    ) -> dict[str, Any]:
        """Serve one run."""
        batches = point.batches(seconds, in_flight(self.where.size))
        station = Station(
            rank=self.where.rank,
            ranks=self.where.size,
            wires=self._wires,
            fabric=self._fabric,
            accelerator=self._accelerator,
            hidden=point.hidden,
            most=max(batch.rows for batch in batches),
            label=label,
            deadline=self.where.deadline,
        )
        stage = CONTESTANTS[system](station)
        gc.collect()
        gc.freeze()
        self._turns.barrier().result(self.where.deadline)
        try:
            stage.run(batches)
        finally:
            gc.unfreeze()
        return {
            "began": stage.start_times,
            "ended": stage.end_times,
            "wrong": stage.wrong,
            "messages": stage.messages,
            "cpu": stage.cpu,
            "compute": max(batch.seconds for batch in batches),
        }

    def close(self) -> None:
        """Leave together."""
        self._turns.barrier().result(self.where.deadline)
        self._fabric.close()
        self._accelerator.close()
        distributed.destroy_process_group()


def serve(task: dict[str, Any], output: IO[str]) -> None:
    """Every run of a task; a line for each."""
    torch.set_num_threads(1)
    prompt_timers()
    rank = Rank(Rendezvous(**task["where"]))
    points = [Point(**fields) for fields, _, _ in task["runs"]]
    sizes = sorted({message_bytes(point.hidden, point.tokens) for point in points})
    link = rank.gauge(sizes)
    output.write(json.dumps(link) + "\n")
    seconds = dict(link["seconds"])
    for number, (point, (_, system, turn)) in enumerate(zip(points, task["runs"], strict=True)):
        figures = rank.run(point, system, f"run{number}", seconds)
        output.write(json.dumps({"system": system, "round": turn, **figures}) + "\n")
        output.flush()
    rank.close()


def main() -> None:
    """Serve what is asked for on standard input; the process that started this one is survived by
    nothing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    task = json.loads(sys.stdin.readline())
    with Path(task["told"]).open("w") as output:
        serve(task, output)


if __name__ == "__main__":
    main()
