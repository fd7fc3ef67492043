"""Plays a case on its world: what senders hand over, and what receivers read of it."""

import ctypes
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from exploration.channel.case import MAX_ROWS, Case, Fault, Manner
from exploration.channel.faulty_communicator import Meddling
from exploration.channel.host import Host, Script
from exploration.channel.sent_tensors import Maker, contents
from exploration.engine.world_profiles import WORLDS
from torch import Tensor

from equipoise.backends.virtual.world import VirtualWorld
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import EquipoiseError
from equipoise.hal.stream import Role
from equipoise.pipeline.channel.edge import Edge, ReadMode, SliceGroup
from equipoise.pipeline.channel.message import MessageLayout, Tensors
from equipoise.pipeline.channel.recv import ReceivingEnd
from equipoise.pipeline.channel.schema import MessageSchema, RowField, SchemaTemplate, SliceMode
from equipoise.pipeline.channel.send import SendingEnd
from equipoise.pipeline.channel.statistics import EdgeCounters, EdgeStatistics
from equipoise.pipeline.intermediate_tensors import AsyncIntermediateTensors

TEMPLATE = SchemaTemplate(
    (
        RowField("hidden", (2,), torch.float32, SliceMode.SLICED),
        RowField("mine", (1,), torch.int64),
    ),
    max_rows=MAX_ROWS,
)
ELSEWHERE = SchemaTemplate(
    (TEMPLATE.fields[0], RowField("mine", (2,), torch.int32)), max_rows=MAX_ROWS
)
"""Other tensors, whose messages are as large."""
LIMIT = 20_000
"""Micro-steps after which a play that should have ended counts as a hang."""


@dataclass
class Observation:
    """What one rank read of one step, tensor by tensor.

    Attributes:
        rank: of the reader.
        step: of which it read.
        errors: what the first and the second read raised, where they did.
        values: what it saw.
        failed_tensors: the mapping that raised, kept as whoever logs an error may.
    """

    rank: int
    step: int
    errors: list[EquipoiseError] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    failed_tensors: AsyncIntermediateTensors | None = field(default=None, repr=False)


@dataclass
class Record:
    """What came of a case.

    Attributes:
        observations: what was read, in the order in which it was.
        errors: of the hosts, by rank.
        stuck_ranks: ranks whose hosts did not end.
        pending_operations: operations and programs that were left when everybody had ended.
        messages: begun, by rank.
        new_buffers: buffers allocated after the beginning, by rank.
        lent_reads: what senders read of tensors that they were lent, and what they had written
            there.
    """

    observations: list[Observation] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    stuck_ranks: list[int] = field(default_factory=list)
    pending_operations: int = 0
    messages: dict[int, int] = field(default_factory=dict)
    new_buffers: dict[int, int] = field(default_factory=dict)
    lent_reads: list[tuple[list[float], list[float]]] = field(default_factory=list)


def expected(case: Case, rank: int, step: int) -> dict[str, list[float]]:
    """What rank `rank` of the receivers is to read of a step."""
    tensors = contents(step, case.rows[step], sender=rank - case.parts)
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


class Trusting(SendingEnd):
    """Does not compare what is to be sliced: that blocks a host in a collective, and a host that
    is blocked in a virtual world leaves no other above it. It has tests on processes."""

    def _verify_slices(self, layout: MessageLayout, tensors: Tensors) -> None:
        pass


class Play:
    """A case under way."""

    def __init__(self, case: Case, world: VirtualWorld) -> None:
        self.case = case
        self.world = world
        self.record = Record()
        self._meters: dict[int, tuple[EdgeCounters, EdgeStatistics]] = {}
        for sender in range(case.parts):
            self._host(sender, self._send(sender))
            self._host(sender + case.parts, self._receive(sender + case.parts))

    def run(self) -> Record:
        """To the end."""
        micro_steps = 0
        while micro_steps < LIMIT:
            while (count := self.world.movable()) and micro_steps < LIMIT:
                self.world.advance(self.world.choose(count))
                micro_steps += 1
            if not self.world.expire():
                break
        hosts = [lane for lane in self.world.steppers if isinstance(lane, Host)]
        self.record.stuck_ranks = [host.ranks[0] for host in hosts if not host.ended]
        self.record.errors = {h.ranks[0]: h.error for h in hosts if h.error is not None}
        self.record.pending_operations = len(self.world.network.pending)
        for rank, (meter, start) in self._meters.items():
            usage = meter.snapshot().since(start)
            self.record.messages[rank], self.record.new_buffers[rank] = (
                usage.messages,
                usage.buffers,
            )
        return self.record

    def _host(self, rank: int, script: Script) -> None:
        self.world.steppers.append(Host(rank, script))

    def _edge(self, rank: int, place: int, peer: int) -> Edge:
        """The end of the edge of sender `place` that `rank` has."""
        case, fabric = self.case, self.world.fabric(rank)
        slices = None
        if case.parts > 1:
            first = 0 if rank < case.parts else case.parts
            members = tuple(range(first, first + case.parts))
            gathering = fabric.open(f"slices of {first}", members)
            slices = SliceGroup(gathering, fabric.open(f"comparison of {first}", members))
        accelerator = self.world.accelerator(rank)
        ends = (place, place + case.parts)
        return Edge(
            name=f"{place} to {place + case.parts}",
            communicator=self._line(rank, fabric.open(f"edge {place}", ends)),
            peer=peer,
            accelerator=accelerator,
            stream=accelerator.stream(Role.COMPUTE),
            deadline=1.0,
            depth=case.depth,
            slice_group=slices,
            read_mode=case.reading,
        )

    def _line(self, rank: int, communicator: Communicator) -> Communicator:
        """What `rank` sends over: the first sender's messages are meddled with."""
        if rank or self.case.fault in (Fault.NONE, Fault.OTHER, Fault.KILLED):
            return communicator
        meddling: Any = Meddling(communicator, self.case.fault, self.case.at)
        return cast(Communicator, meddling)

    def _class(self, rank: int, step: int) -> MessageSchema:
        """As which a sender hands a step over."""
        template, rows = TEMPLATE, self.case.rows[step]
        if (rank, step, self.case.fault) == (0, self.case.at, Fault.OTHER):
            template = ELSEWHERE
        return template.schema_for(rows)

    def _send(self, rank: int) -> Script:
        edge = self._edge(rank, rank, peer=1)
        end = Trusting(edge)
        end.reserve(TEMPLATE.schema_for(TEMPLATE.max_rows))
        self._meters[rank] = (edge.counters, edge.counters.snapshot())
        maker = Maker(self, rank, edge)
        departures = []
        for step in range(len(self.case.rows)):
            yield partial(maker.lets, end)
            if (rank, step, self.case.fault) == (0, self.case.at, Fault.KILLED):
                self.world.kill(rank)
                self.world.stopped.add(rank)
                return
            departures.append(maker.send(end, step, self._class(rank, step)))
        yield lambda: all(departure.is_completed() for departure in departures)
        end.drain()
        maker.let_go()

    def _receive(self, rank: int) -> Script:
        place = rank - self.case.parts
        edge = self._edge(rank, place, peer=0)
        end = ReceivingEnd(edge)
        end.reserve(TEMPLATE.schema_for(TEMPLATE.max_rows))
        self._meters[rank] = (edge.counters, edge.counters.snapshot())
        reader = Reader(self, rank, edge)
        posted = 0
        for step in range(len(self.case.rows)):
            while posted < min(step + self.case.ahead, len(self.case.rows)):
                yield partial(reader.lets, end)
                end.expect(TEMPLATE.schema_for(self.case.rows[posted]))
                posted += 1
            yield from reader.read(end, step)
        reader.let_go()
        yield lambda: end.is_drained() and not self.world.device(rank).tasks
        end.drain()


class Reader:
    """What one receiver does with the tensors that it takes.

    Args:
        play: whose record it writes.
        rank: whose reader it is.
        edge: over which the tensors come.
    """

    def __init__(self, play: Play, rank: int, edge: Edge) -> None:
        self._play = play
        self._rank = rank
        self._edge = edge
        manners = play.case.manners
        self._manners = manners if rank == play.case.parts else manners[::-1]
        self._deferred: list[tuple[int, Observation, Tensor]] = []

    def lets(self, end: ReceivingEnd) -> bool:
        """Whether `expect` would not wait; a reader that keeps tensors lets go of them for it."""
        if not end.has_free_buffer():
            self._read_deferred(before=len(self._play.case.rows))
        return end.has_free_buffer()

    def read(self, end: ReceivingEnd, step: int) -> Script:
        """Take a step's tensors, and read them as its manner has it."""
        manner = self._manners[step]
        arrived = end.receive()
        if manner is Manner.SKIPS:
            return
        if self._edge.read_mode is ReadMode.HOST and not self._blocks(step):
            yield arrived.ready
        observation = Observation(self._rank, step)
        self._play.record.observations.append(observation)
        tensors = _first_read(arrived, observation)
        if not tensors:
            return
        self._launch(observation, "hidden", tensors["hidden"])
        if manner is Manner.KEEPS:
            self._deferred.append((step, observation, tensors["mine"]))
        else:
            self._launch(observation, "mine", tensors["mine"])
        del tensors
        if manner is Manner.RELEASES:
            arrived.release()
        self._read_deferred(before=step - 1)

    def let_go(self) -> None:
        """Read what is left, and keep nothing."""
        self._read_deferred(before=len(self._play.case.rows))

    def _read_deferred(self, before: int) -> None:
        for step, observation, tensor in self._deferred:
            if step < before:
                self._launch(observation, "mine", tensor)
        self._deferred = [deferred for deferred in self._deferred if deferred[0] >= before]

    def _blocks(self, step: int) -> bool:
        """Whether its host reads without looking first. Where slices are gathered it would block
        for hosts that it was called beneath."""
        return self._play.case.parts == 1 and step % 2 == 1

    def _launch(self, observation: Observation, name: str, tensor: Tensor) -> None:
        """Read it in a program: where streams read, by its address, as a kernel does that holds no
        tensor; where the host does, it holds what it reads."""
        if self._edge.read_mode is ReadMode.HOST:
            self._edge.stream.launch(partial(_see_tensor, observation, name, tensor))
            return
        kind: Any = {torch.float32: ctypes.c_float, torch.int64: ctypes.c_int64}[tensor.dtype]
        array = (kind * tensor.numel()).from_address(tensor.data_ptr())
        self._edge.stream.launch(partial(_see, observation, name, array))


def _first_read(arrived: AsyncIntermediateTensors, observation: Observation) -> dict[str, Tensor]:
    """The tensors; or none, and what both reads raised."""
    for _ in range(2):
        try:
            return {name: arrived[name] for name in ("hidden", "mine")}
        except EquipoiseError as error:
            observation.errors.append(error.with_traceback(None))  # as in `Host.step`
    observation.failed_tensors = arrived
    return {}


def _see_tensor(observation: Observation, name: str, tensor: Tensor) -> None:
    observation.values[name] = tensor.flatten().tolist()


def _see(observation: Observation, name: str, array: Iterable[float]) -> None:
    observation.values[name] = list(array)


def play(case: Case) -> Record:
    """What comes of a case."""
    with closing(WORLDS[case.world].world(2 * case.parts, case.schedule)) as world:
        return Play(case, world).run()
