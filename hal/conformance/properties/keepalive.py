"""Family *keepalive*: operations own their buffers; what a work answers, and how often."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    Until,
    catch,
    control_plane,
    gather_ballots,
    occupy_freed_memory,
    require,
    require_junk_untouched,
    wait_for_outcome,
    wait_for_success,
)
from equipoise.hal.conformance.fixtures.comm_operations import (
    ALL_OPS,
    GROUP_OPS,
    PEERS_AND_MESSAGES,
    SINGLE_WORK_OPS,
    UNCLIPPED_RANKS,
    UNMATCHED_BYTES,
    IssuedOperation,
    clip_to_group,
    deduplicate_messages,
    issue_operation,
    issue_step,
    issue_unmatched,
    joint_operation,
    operations,
    several_ranks,
    thread_future,
    unmatched_steps,
    wait_and_check,
)
from equipoise.hal.conformance.fixtures.slot_store import (
    SLOT_ROLES,
    SegmentSpec,
    SlotStoreFixture,
    format_versions,
    make_slot_store,
    versions_in,
)
from equipoise.hal.conformance.fixtures.strategies import (
    offered,
    offers_any,
    one_common_size,
    programs_of,
    step_of,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import (
    DeadlineLength,
    Property,
    PropertyScope,
    Traits,
    all_of,
    independent_groups,
)
from equipoise.hal.errors import CommunicatorFailed, ResultPending, StreamFailed
from equipoise.hal.stream import Role
from equipoise.hal.work import Work

FAMILY = "keepalive"
MAX_SLOT_OPS = 6
SLOTS = 2
SEGMENTS = [SegmentSpec(torch.uint8, 24), SegmentSpec(torch.uint8, 40)]
SLOT, STREAM = st.integers(0, SLOTS - 1), st.sampled_from(SLOT_ROLES)


def _slot_op_programs(_: Traits) -> st.SearchStrategy[Program]:
    """Slot and stream; the version that a step brings is its number, from 1."""
    kinds = [step_of(op, SLOT, STREAM) for op in ("unpack", "write", "pack")]
    return programs_of(*kinds, most=MAX_SLOT_OPS)


@dataclass
class _SlotOpRunner:
    """Makes the calls of a program, each with memory that it drops at once.

    Attributes:
        fixture: the store; staging buffer k belongs to slot k.
        expected_versions: the version that each slot will hold.
        junk: what took the memory that was dropped.
    """

    fixture: SlotStoreFixture
    expected_versions: list[int] = field(default_factory=lambda: [0] * SLOTS)
    junk: list[Tensor] = field(default_factory=list)

    def run_step(self, version: int, slot: int, step: Step) -> None:
        """Make one call, drop its buffers, and reuse their memory."""
        stream = self.fixture.stream(str(step.args[1]))
        sizes = [self.fixture.slot_bytes]
        if step.op == "pack":
            self.fixture.store.pack([slot], self._blob(0), stream)
        elif step.op == "unpack":
            self.fixture.store.unpack(self._blob(version), [slot], stream)
            self.expected_versions[slot] = version
        else:
            source = self.fixture.make_source(self._blob(version))
            self.fixture.keepalive.clear()
            sizes = [segment.nbytes for segment in source]
            self.fixture.store.write([slot], [source], stream)
            del source
            self.expected_versions[slot] = version
        self.junk += occupy_freed_memory(self.fixture.ctx, *sizes)
        if step.op == "unpack":
            self.fixture.store.commit([(slot, slot)], stream)

    def _blob(self, version: int) -> Tensor:
        return self.fixture.ctx.full((self.fixture.slot_bytes,), version)


def _play_slot_ops(ctx: RankContext, program: Program) -> Play:
    runner = _SlotOpRunner(make_slot_store(ctx, SLOTS, SLOTS, SEGMENTS))
    for number, step in enumerate(program.steps, 1):
        runner.run_step(number, int(step.args[0]), step)
        yield NEXT
    ctx.drain(*(ctx.accelerator.stream(Role(role)) for role in SLOT_ROLES))
    for slot, expected in enumerate(runner.expected_versions):
        versions = versions_in(runner.fixture.read_slot(slot))
        require(
            "K1",
            versions == [expected],
            f"slot {slot} holds {format_versions(versions)}, not {expected}",
        )
    require_junk_untouched("K1", runner.junk)


SLOT_OPS = (
    Property(
        name="slot-operations-own-their-buffers",
        family=FAMILY,
        clauses=("K1",),
        claim="An operation of a store owns what it was given: its caller may drop that at once.",
        programs=_slot_op_programs,
        play=_play_slot_ops,
    ),
)


THREADS = 2
MAX_WORKS = 3
QUESTIONS = ("result", "done", "wait")


def _question(number: int, call: str, host: int) -> Step:
    return Step("look", (number, call), thread=host)


def _questions(count: int) -> st.SearchStrategy[list[Step]]:
    """Queries of works by either thread."""
    number, host = st.integers(0, count - 1), st.integers(0, THREADS - 1)
    return st.lists(st.builds(_question, number, st.sampled_from(QUESTIONS), host), max_size=6)


def _ended_programs(traits: Traits) -> st.SearchStrategy[Program]:
    step_lists = st.lists(operations(traits), min_size=1, max_size=MAX_WORKS)

    def build(size: int, steps: list[Step], queries: list[Step]) -> Program:
        unique_steps = deduplicate_messages(clip_to_group(steps, size))
        valid = [look for look in queries if int(look.args[0]) < len(unique_steps)]
        return make_program([*unique_steps, *valid], size)

    return st.builds(build, one_common_size(traits), step_lists, _questions(MAX_WORKS))


def _play_ended(ctx: RankContext, program: Program) -> Play:
    """Thread 0 issues, thread 1 waits for the ends, then both query."""
    issued, ended = thread_future(ctx, "issued"), thread_future(ctx, "ended")
    if ctx.thread == 0:
        issued.set_result((yield from _issue_all(ctx, program)))
    transfers: dict[int, IssuedOperation] = yield from issued.wait_for_result(
        ctx, "what host 0 issued"
    )
    if ctx.thread == 1:
        yield from wait_and_check(ctx, transfers.values(), "K3")
        ended.set_result()
    yield from ended.wait_for_result(ctx, "the ends that host 1 waits for")
    stream = ctx.accelerator.stream(Role.AUX)
    for step in program.steps_of(ctx.rank, ctx.thread):
        if step.op == "look" and step.args[0] in transfers:
            transfer = transfers[int(step.args[0])]
            _ask_succeeded(transfer.work, str(step.args[1]), ctx)
            transfer.check_outputs("K3")
            yield NEXT
    ctx.drain(stream)


def _issue_all(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    transfers = {}
    for number, step in enumerate(program.steps):
        if step.op != "look" and (transfer := issue_step(ctx, comm, step, number)) is not None:
            transfers[number] = transfer
        yield NEXT
    return transfers


def _ask_succeeded(work: Work, question: str, ctx: RankContext) -> None:
    """Ask a work that has ended well."""
    if question == "wait":
        work.wait(ctx.accelerator.stream(Role.AUX))
    elif question == "done":
        require("K3", work.done(), "a work that had ended says that it has not")
    else:
        work.result(0.0)


def _done_programs(traits: Traits) -> st.SearchStrategy[Program]:
    step_lists = st.lists(operations(traits, SINGLE_WORK_OPS), min_size=1, max_size=MAX_WORKS)
    return st.builds(
        lambda n, steps: make_program(deduplicate_messages(clip_to_group(steps, n)), n),
        one_common_size(traits),
        step_lists,
    )


def _play_done(ctx: RankContext, program: Program) -> Play:
    for transfer in (yield from _issue_all(ctx, program)).values():
        error = yield from result_after_done(ctx, transfer.work, transfer.what)
        require("K5", error is None, f"{transfer.what} is done, yet result() gives {error!r}")
        transfer.check_outputs("K5")


def _failed_programs(traits: Traits) -> st.SearchStrategy[Program]:
    def build(size: int, alone: Step, queries: list[Step]) -> Program:
        return make_program([alone, *queries], size)

    return st.builds(build, one_common_size(traits), unmatched_steps(traits), _questions(1))


def _play_failed(ctx: RankContext, program: Program) -> Play:
    """Host 0 waits for the failure, then both ask."""
    failed = thread_future(ctx, "failed")
    if ctx.thread == 0:
        comm = yield from ctx.communicator()
        op, failing_work = issue_unmatched(ctx, comm, program.steps[0])
        error = yield from result_after_done(ctx, failing_work, f"the failure of {op}")
        what = f"rank {ctx.rank}: {op} is done, nobody answered it, and result() gives {error!r}"
        require("K5", _failure(error), what)
        failed.set_result(failing_work)
    work: Work = yield from failed.wait_for_result(ctx, "what failed")
    for step in program.steps_of(ctx.rank, ctx.thread):
        if step.op == "look":
            _ask_failed(ctx, work, str(step.args[1]))
            yield NEXT


def result_after_done(ctx: RankContext, work: Work, what: str) -> Play:
    """What `result` raises, without any time, once `done` is true; to be used with `yield from`."""
    yield Until(work.done, what)
    if not work.done():  # on a real device nothing has waited yet
        catch(lambda: work.result(ctx.timeout), CommunicatorFailed)
    return _result_error(work)


def _result_error(work: Work) -> Exception | None:
    return catch(lambda: work.result(0.0), CommunicatorFailed, ResultPending)


def _failure(error: Exception | None) -> bool:
    return isinstance(error, CommunicatorFailed)


def _ask_failed(ctx: RankContext, work: Work, question: str) -> None:
    """Ask a work that has failed; what becomes of a stream that waits is judged by E10."""
    if question == "wait":
        stream = ctx.accelerator.stream(Role.AUX)
        catch(lambda: work.wait(stream), CommunicatorFailed, StreamFailed)
        catch(lambda: ctx.drain(stream), StreamFailed)
    elif question == "done":
        require("K3", work.done(), "a work that had failed says that it has not ended")
    else:
        require("K3", _failure(_result_error(work)), "a work that had failed did not raise again")


HANDLES = (
    Property(
        name="an-ended-work-may-be-queried-by-any-thread",
        family=FAMILY,
        clauses=("K3",),
        claim="done, wait and result may be called any number of times from any thread.",
        programs=_ended_programs,
        play=_play_ended,
        needs=all_of(several_ranks, offers_any(*ALL_OPS)),
        scope=PropertyScope.GROUP,
        threads=THREADS,
    ),
    Property(
        name="result-does-not-block-after-done",
        family=FAMILY,
        clauses=("K5",),
        claim="Once done is true result returns at once, and everything has arrived.",
        programs=_done_programs,
        play=_play_done,
        needs=all_of(several_ranks, offers_any(*SINGLE_WORK_OPS)),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="a-failed-work-raises-at-every-call",
        family=FAMILY,
        clauses=("K3", "K5"),
        claim="After a failure done is true, and result raises it to everyone who asks.",
        programs=_failed_programs,
        play=_play_failed,
        needs=PEERS_AND_MESSAGES,
        scope=PropertyScope.GROUP,
        threads=THREADS,
        deadline=DeadlineLength.SHORT,
    ),
)


IsFreed = Callable[[], bool]
_weak_storage_reference: Any = StorageWeakRef
"""Whose own module has no types; sees the memory go, where a weak tensor sees only the tensor."""
MAX_OPERATIONS = 6
BATCHES = ("exchange", "message", "all_gather")
"""Operations, many of them several messages."""
LATER_CALLS = 12
"""Number of later calls by which the memory of dropped works is released (clause K2)."""
MAX_HELD_OPERATIONS = 2
"""Operations that a backend may hold on to: gloo's two threads each keep their latest one."""


def _dropped_programs(traits: Traits) -> st.SearchStrategy[Program]:
    step = st.one_of(operations(traits), st.just(Step("blindly")))

    def build(size: int, steps: list[Step]) -> Program:
        return make_program(deduplicate_messages(clip_to_group(steps, size)), size)

    return st.builds(
        build, one_common_size(traits), st.lists(step, min_size=1, max_size=MAX_OPERATIONS)
    )


def _play_dropped(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    bare: list[IssuedOperation] = []
    junk: list[Tensor] = []
    blind = False
    for number, step in enumerate(program.steps):
        if step.op != "blindly":
            _issue_and_drop_buffers(ctx, comm, (step, number, blind), bare, junk)
            yield NEXT
        blind = step.op == "blindly"
    yield from wait_and_check(ctx, bare, "K1")
    require_junk_untouched("K1", junk)


def _issue_and_drop_buffers(
    ctx: RankContext,
    comm: Communicator,
    order: tuple[Step, int, bool],
    bare: list[IssuedOperation],
    junk: list[Tensor],
) -> None:
    """Issue a step and drop its buffers, *blindly* those of the result too; keep its work."""
    step, number, blind = order
    transfer = issue_step(ctx, comm, step, number)
    if transfer is None:
        return
    dropped = [*transfer.operands, *(output for output, _ in transfer.outputs if blind)]
    sizes = [buffer.nbytes for buffer in dropped]
    bare.append(replace(transfer, operands=(), outputs=() if blind else transfer.outputs))
    del transfer, dropped
    junk += occupy_freed_memory(ctx, *sizes)


def _works_programs(traits: Traits) -> st.SearchStrategy[Program]:
    drop = st.builds(lambda rank: Step("drop", (), rank), UNCLIPPED_RANKS)
    step = st.one_of(operations(traits), drop)

    def build(size: int, steps: list[Step]) -> Program:
        clipped_steps = [replace(s, rank=s.rank % size) if s.op == "drop" else s for s in steps]
        return make_program(deduplicate_messages(clip_to_group(clipped_steps, size)), size)

    return st.builds(
        build, one_common_size(traits), st.lists(step, min_size=2, max_size=MAX_OPERATIONS + 2)
    )


def _play_works(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    transfers: list[IssuedOperation] = []
    dropped: list[list[IsFreed]] = []
    for number, step in enumerate(program.steps):
        if step.op == "drop":
            if step.rank == ctx.rank:
                dropped += [_freed_checks(transfer) for transfer in transfers]
                transfers.clear()
                ctx.scribble_freed_memory()
        else:
            _keep_work(transfers, issue_step(ctx, comm, step, number))
        yield NEXT
    yield from wait_and_check(ctx, transfers, "K1")
    yield from _require_freed(ctx, comm, dropped)


def _keep_work(transfers: list[IssuedOperation], transfer: IssuedOperation | None) -> None:
    if transfer is not None:
        transfers.append(transfer)


def _freed_checks(transfer: IssuedOperation) -> list[IsFreed]:
    """Whether the memory of each buffer has been released; does not keep it alive."""
    buffers = [*transfer.operands, *(output for output, _ in transfer.outputs)]
    return [_freed_check(buffer) for buffer in buffers]


def _freed_check(buffer: Tensor) -> IsFreed:
    reference: Any = _weak_storage_reference(buffer.untyped_storage())
    return lambda: bool(reference.expired())


def _require_freed(ctx: RankContext, comm: Communicator, dropped: list[list[IsFreed]]) -> Play:
    """Make later calls, as many on every rank, and count the operations that are still alive."""
    for _ in range(LATER_CALLS):
        later = issue_operation(ctx, comm, joint_operation(comm))
        yield from wait_for_success(ctx, later, "a later call")
    alive = sum(not all(is_freed() for is_freed in buffers) for buffers in dropped)
    what = (
        f"{alive} of {len(dropped)} dropped works hold memory {LATER_CALLS} calls after their end"
    )
    require("K2", alive <= MAX_HELD_OPERATIONS, what)


def _order_programs(traits: Traits) -> st.SearchStrategy[Program]:
    finish_one = st.builds(
        lambda number: Step("finish", (number,)), st.integers(0, MAX_OPERATIONS - 1)
    )
    step = st.one_of(operations(traits, BATCHES), finish_one)

    def build(size: int, steps: list[Step]) -> Program:
        return make_program(_valid_finishes(deduplicate_messages(clip_to_group(steps, size))), size)

    return st.builds(
        build, one_common_size(traits), st.lists(step, min_size=1, max_size=MAX_OPERATIONS)
    )


def _valid_finishes(steps: list[Step]) -> list[Step]:
    """Each *finish* names the place, in the program, of an operation before it."""
    valid: list[Step] = []
    for step in steps:
        if step.op == "finish":
            issued = [place for place, earlier in enumerate(valid) if earlier.op != "finish"]
            if not issued:
                continue
            step = Step("finish", (issued[int(step.args[0]) % len(issued)],))
        valid.append(step)
    return valid


def _play_order(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    in_flight: dict[int, IssuedOperation] = {}
    for number, step in enumerate(program.steps):
        if step.op == "finish":
            yield from wait_and_check(ctx, [in_flight.pop(int(step.args[0]), None)], "K4")
        elif (transfer := issue_step(ctx, comm, step, number)) is not None:
            in_flight[number] = transfer
        yield NEXT
    yield from wait_and_check(ctx, reversed(in_flight.values()), "K4")


DROPPED_OPS = ("isend", "irecv", *GROUP_OPS)
WAITED = b"waited"
"""The ballot of a rank whose drop lasted about as long as an operation may."""


def _peerless_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`drop(operation, late)`: one rank comes when the others have dropped their handles."""
    step = st.builds(
        lambda op, late: Step("drop", (op, late)),
        st.sampled_from(offered(traits, DROPPED_OPS)),
        UNCLIPPED_RANKS,
    )

    def build(size: int, step: Step) -> Program:
        return make_program([replace(step, args=(step.args[0], int(step.args[1]) % size))], size)

    return st.builds(build, one_common_size(traits), step)


def _play_peerless(ctx: RankContext, program: Program) -> Play:
    """The late rank comes when it is told, by the store, that the others have dropped.

    So a drop that waits for it lasts until the deadline of the operation, which then fails. Whether
    it does is what is judged, and not how long a drop takes: that only tells K6 from K2.
    """
    comm = yield from ctx.communicator()
    other = yield from ctx.communicator("other")
    op, late = str(program.steps[0].args[0]), int(program.steps[0].args[1])
    early = [rank for rank in range(ctx.size) if rank != late]
    if op in ("isend", "irecv"):
        early = [(late + 1) % ctx.size]
    dropped, joint = f"{comm.purpose}/dropped", joint_operation(other)
    if ctx.rank in early:
        witness = issue_operation(ctx, other, joint)
        work = _issue_with(ctx, comm, op, late)
        yield NEXT
        began = time.monotonic()
        del work
        waited = witness.done() or time.monotonic() - began > ctx.deadline / 2
        control_plane(ctx).cast(dropped, WAITED if waited else b"")
    else:
        ballots = yield from gather_ballots(ctx, dropped, early)
        if ctx.rank == late:
            answer = {"isend": "irecv", "irecv": "isend"}.get(op, op)
            last = _issue_with(ctx, comm, answer, early[0])
            error = yield from wait_for_outcome(ctx, last, f"{answer}, to what was dropped")
            blocked = WAITED in ballots
            how = "a drop lasted until its deadline" if blocked else "a drop ended the operation"
            what = f"rank {ctx.rank}: {answer} after the others had dropped their handles of {op}"
            require("K6" if blocked else "K2", error is None, f"{what}: {how}: {error!r}")
        witness = issue_operation(ctx, other, joint)
    yield from wait_for_success(ctx, witness, f"{joint} of another communicator")


def _issue_with(ctx: RankContext, comm: Communicator, op: str, peer: int) -> Work:
    """Issue an operation of all ranks, or one with `peer`."""
    if op == "isend":
        return comm.isend(ctx.full((UNMATCHED_BYTES,), comm.rank), peer)
    if op == "irecv":
        return comm.irecv(ctx.empty((UNMATCHED_BYTES,)), peer)
    return issue_operation(ctx, comm, op)


DROPS = (
    Property(
        name="dropping-a-work-waits-for-no-peer",
        family=FAMILY,
        clauses=("K6", "K2"),
        claim="Dropping a handle returns before the peer has come, and the operation goes on.",
        programs=_peerless_programs,
        play=_play_peerless,
        # The operation of another communicator ends while this one waits.
        needs=all_of(several_ranks, offers_any(*GROUP_OPS), independent_groups),
        scope=PropertyScope.GROUP,
    ),
)


PROPERTIES = (
    Property(
        name="operations-own-their-buffers",
        family=FAMILY,
        clauses=("K1",),
        claim="An operation owns its buffers: its caller may drop them at once.",
        programs=_dropped_programs,
        play=_play_dropped,
        needs=all_of(several_ranks, offers_any(*ALL_OPS)),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="dropped-works-neither-cancel-nor-leak",
        family=FAMILY,
        clauses=("K2", "K1"),
        claim="Without its work an operation goes on, and its memory comes back in the end.",
        programs=_works_programs,
        play=_play_works,
        needs=all_of(several_ranks, offers_any(*GROUP_OPS)),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="works-end-in-any-order",
        family=FAMILY,
        clauses=("K4",),
        claim="A work may be waited for before earlier ones, and ends with all of its batch.",
        programs=_order_programs,
        play=_play_order,
        needs=all_of(several_ranks, offers_any(*BATCHES)),
        scope=PropertyScope.GROUP,
    ),
    *DROPS,
    *HANDLES,
    *SLOT_OPS,
)
