"""A smoke program of twenty steps that every mutant must pass where nothing is late."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal import routing
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.communicator import Communicator, Exchange, PeerBuffer
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    control_plane,
    gather_ballots,
    require,
    require_equal,
    wait_for_success,
)
from equipoise.hal.conformance.fixtures.expert_steps import (
    BrokenClauses,
    ExpertRun,
    close_run,
    open_run,
    play_steps,
    usual_calls,
)
from equipoise.hal.conformance.program import Case, Program, Step, make_program
from equipoise.hal.conformance.property import Property, PropertyScope
from equipoise.hal.conformance.subject import Subject, missing_capability
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.slots import Segment, SlotLayout, SlotStore
from equipoise.hal.stream import Event, Role, Stream

CLAUSE = "R2"
"""The violation of a failed step; a backend that fails here is not one behaviour off."""
SLOT_BYTES = 32
TABLE = routing.build_table(
    torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([65536, 32768, 32768]), 2
)
"""Three slots, one of them for expert 0 and two for expert 1."""


@dataclass
class Device:
    """A device in innocent use: one method a step."""

    ctx: RankContext
    store: SlotStore
    event: Event
    blob: Tensor
    tables: Tables
    slots: list[Tensor] = field(default_factory=list)

    @property
    def compute(self) -> Stream:
        return self.ctx.accelerator.stream(Role.COMPUTE)

    @property
    def copy(self) -> Stream:
        return self.ctx.accelerator.stream(Role.COPY)

    def launch(self) -> None:
        self.compute.launch(lambda: self.blob.fill_(7))
        self.ctx.drain()
        require(CLAUSE, bool((self.blob == 7).all()), "a launch did nothing")

    def record(self) -> None:
        self.compute.record(self.event)
        self.event.synchronize(self.ctx.timeout)
        require(CLAUSE, self.event.query(), "an event that was waited for is not reached")

    def wait(self) -> None:
        self.copy.wait(self.event)
        self.ctx.drain()

    def unpack(self) -> None:
        self.store.unpack(self.blob, [0], self.copy)
        self.ctx.drain()

    def commit(self) -> None:
        self.store.commit([(0, 1)], self.compute)
        self.ctx.drain()
        require_equal(CLAUSE, self.slots[1], self.blob, "slot 1 after a commit")

    def pack(self) -> None:
        row = self.ctx.empty((SLOT_BYTES,))
        self.store.pack([1], row, self.compute)
        self.ctx.drain()
        require_equal(CLAUSE, row, self.blob, "slot 1, packed")

    def checksum(self) -> None:
        out = self.ctx.empty((1,), torch.int64)
        self.store.checksum_slots([1], out, self.compute)
        self.ctx.drain()
        require(CLAUSE, int(out) == as_int64(checksum(self.blob)), "the checksum of slot 1")

    def write(self) -> None:
        source = self.ctx.full((SLOT_BYTES,), 9)
        self.store.write([2], [[source]], self.copy)
        self.ctx.drain()
        require_equal(CLAUSE, self.slots[2], source, "slot 2 after a write")

    def commit_tables(self) -> None:
        row = (t.view(1, -1) for t in (TABLE.start, TABLE.replicas, TABLE.cumulative))
        update = TableUpdate((0,), *row)
        self.ctx.accelerator.kernels.commit_tables(update, self.tables, self.compute)
        self.ctx.drain()
        require(CLAUSE, int(self.tables.generation[0]) == 1, "no new generation after a commit")

    def route(self) -> None:
        ids = self.ctx.copy_of(torch.tensor([0, 1, 1], dtype=torch.int32))
        slots = self.ctx.empty((3,), torch.int32)
        counts = self.ctx.empty((2,), torch.int32)
        self.ctx.accelerator.kernels.route_and_count(
            ids, self.tables, Salt(0, 0, 0), slots, counts, self.compute
        )
        self.ctx.drain()
        require(CLAUSE, counts.tolist() == [1, 2], "tokens were not counted")
        require(CLAUSE, int(slots[0]) == 0, "expert 0 was not routed to its slot")

    def hand_over(self) -> None:
        if not self.ctx.backend.capabilities.stream_lock:
            return
        lock = self.ctx.accelerator.stream_lock(self.ctx.timeout)
        lock.signal(lock.epoch)
        lock.acquire(self.compute)
        lock.release(self.compute)
        lock.wait(lock.epoch, self.ctx.timeout)

    def lease(self) -> None:
        lease = self.store.lease([1])
        lease.release()
        self.store.commit([(0, 1)], self.compute)
        self.ctx.drain()

    def page(self) -> None:
        pool = self.ctx.accelerator.host_pool(SLOT_BYTES, 2)
        page = pool.take(self.ctx.timeout)
        page.data.fill_(3)
        page.give_back(None)


def device(ctx: RankContext) -> Device:
    """Three slots of one segment, one staging buffer, routing tables of one layer."""
    slots = [ctx.full((SLOT_BYTES,), number) for number in range(3)]
    layout = SlotLayout(tuple((Segment("weight", data),) for data in slots), staging=1)
    accelerator = ctx.accelerator
    return Device(
        ctx,
        accelerator.slot_store(layout),
        accelerator.event(),
        ctx.empty((SLOT_BYTES,)),
        Tables.empty(1, 2, 3, 1, accelerator.device),
        slots,
    )


def play_alone(ctx: RankContext, program: Program) -> Play:
    device_calls = device(ctx)
    calls: dict[str, Callable[[], None]] = {
        "launch": device_calls.launch,
        "record": device_calls.record,
        "wait": device_calls.wait,
        "unpack": device_calls.unpack,
        "commit": device_calls.commit,
        "pack": device_calls.pack,
        "checksum": device_calls.checksum,
        "write": device_calls.write,
        "commit_tables": device_calls.commit_tables,
        "route": device_calls.route,
        "hand_over": device_calls.hand_over,
        "lease": device_calls.lease,
        "page": device_calls.page,
    }
    for step in program.steps:
        calls[step.op]()
        yield NEXT


@dataclass
class Pair:
    """Two ranks in innocent use: one method a step."""

    ctx: RankContext
    group: Communicator

    def data(self, rank: int) -> Tensor:
        return torch.arange(8, dtype=torch.int32) + 10 * rank

    def all_reduce(self) -> Play:
        tensor = self.ctx.copy_of(self.data(self.group.rank))
        yield from wait_for_success(self.ctx, self.group.all_reduce(tensor))
        require_equal(CLAUSE, tensor, self.data(0) + self.data(1), "the sum")

    def all_gather(self) -> Play:
        out = self.ctx.empty((2, 8), torch.int32)
        tensor = self.ctx.copy_of(self.data(self.group.rank))
        yield from wait_for_success(self.ctx, self.group.all_gather(out, tensor))
        require_equal(CLAUSE, out, torch.stack((self.data(0), self.data(1))), "what was gathered")

    def send(self) -> Play:
        peer = 1 - self.group.rank
        out = self.ctx.empty((8,), torch.int32)
        mine = self.ctx.copy_of(self.data(self.group.rank))
        receive = self.group.irecv(out, peer)
        send = self.group.isend(mine, peer)
        yield from wait_for_success(self.ctx, receive)
        yield from wait_for_success(self.ctx, send)
        require_equal(CLAUSE, out, self.data(peer), "a message")

    def exchange(self) -> Play:
        peer = 1 - self.group.rank
        out = self.ctx.empty((8,))
        mine = self.ctx.full((8,), self.group.rank)
        round = Exchange((PeerBuffer(peer, mine),), (PeerBuffer(peer, out),))
        yield from wait_for_success(self.ctx, self.group.exchange(round))
        require(CLAUSE, bool((out == peer).all()), "a blob did not arrive")

    def broadcast(self) -> Play:
        tensor = self.ctx.copy_of(self.data(self.group.rank))
        yield from wait_for_success(self.ctx, self.group.broadcast(tensor, 0))
        require_equal(CLAUSE, tensor, self.data(0), "what was broadcast")

    def barrier(self) -> Play:
        yield from wait_for_success(self.ctx, self.group.barrier())

    def agree(self) -> Play:
        question = f"{self.group.purpose}/smoke"
        control_plane(self.ctx).cast(question, str(self.ctx.rank).encode())
        ballots = yield from gather_ballots(self.ctx, question)
        require(CLAUSE, ballots == (b"0", b"1"), f"ballots {ballots}")
        control_plane(self.ctx).decide(question, b"go")


def play_together(ctx: RankContext, program: Program) -> Play:
    pair = Pair(ctx, (yield from ctx.communicator()))
    calls: dict[str, Callable[[], Play]] = {
        "all_reduce": pair.all_reduce,
        "all_gather": pair.all_gather,
        "send": pair.send,
        "exchange": pair.exchange,
        "broadcast": pair.broadcast,
        "barrier": pair.barrier,
        "agree": pair.agree,
    }
    for step in program.steps:
        yield from calls[step.op]()


def play_expert_step(ctx: RankContext, program: Program) -> Play:
    """A token of the last rank goes to its expert, and comes back."""
    run: ExpertRun = yield from open_run(ctx, program, BrokenClauses(CLAUSE, CLAUSE))
    yield from play_steps(run, program, usual_calls(run, program))
    yield from close_run(run)


def expert_step(size: int) -> Program:
    ones: dict[str, int | str] = dict.fromkeys(("experts_per_rank", "top_k", "replicas"), 1)
    zeros: dict[str, int | str] = dict.fromkeys(("row_capacity", "reals", "spare"), 0)
    steps = [Step("token", (size - 1,), size - 1), Step("dispatch"), Step("finish")]
    return make_program(steps, size, {"hidden": 8, "dtype": "float32", **ones, **zeros})


ALONE = make_program(
    map(
        Step,
        (
            *("launch", "record", "wait", "unpack", "commit", "pack", "checksum", "write"),
            *("commit_tables", "route", "hand_over", "lease", "page"),
        ),
    )
)
TOGETHER = make_program(
    map(Step, ("all_reduce", "all_gather", "send", "exchange", "broadcast", "barrier", "agree")),
    size=2,
)


DEVICE_SMOKE = Property(
    name="innocent-use-of-a-device",
    family="ordering",
    clauses=(CLAUSE,),
    claim="A device does what it is told, one call after another.",
    programs=lambda _: st.just(ALONE),
    play=play_alone,
)
GROUP_SMOKE = Property(
    name="innocent-use-of-a-group",
    family="progress",
    clauses=(CLAUSE,),
    claim="Two ranks reach each other.",
    programs=lambda _: st.just(TOGETHER),
    play=play_together,
    scope=PropertyScope.GROUP,
)
EXPERT_SMOKE = Property(
    name="innocent-use-of-an-expert-parallel-library",
    family="expert_parallel",
    clauses=(CLAUSE,),
    claim="A token reaches its expert, and its result returns.",
    programs=lambda _: st.just(expert_step(1)),
    play=play_expert_step,
    scope=PropertyScope.GROUP,
)
SMOKE = (DEVICE_SMOKE, GROUP_SMOKE)


def smoke(subject: Subject) -> None:
    """Play the twenty steps on the eager schedule. Raises `Violation`."""
    for claim in SMOKE:
        if missing_capability(claim, subject.traits) is None:
            subject.play(claim, Case(ALONE if claim.scope is PropertyScope.DEVICE else TOGETHER))
    if subject.traits.expert_parallel is not None:
        size = min(2, *(subject.traits.expert_parallel.group_sizes or (2,)))
        subject.play(EXPERT_SMOKE, Case(expert_step(size)))
