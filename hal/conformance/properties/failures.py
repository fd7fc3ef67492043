"""Family *failures*: unmatched, cancelled, aborted and closed operations, and rebuild.

An unmatched operation must end in an error that names it, without failing any other communicator.
"""

import threading
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.capabilities import Operation
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
    to_host,
    wait_for_outcome,
)
from equipoise.hal.conformance.fixtures.collectives import CLOSING_KEY
from equipoise.hal.conformance.fixtures.comm_operations import (
    ELEMENT_COUNTS,
    GROUP_OPS,
    NEXT_RANK_OPS,
    PEERS_AND_MESSAGES,
    UNCLIPPED_RANKS,
    UNMATCHED_BYTES,
    WARM_STEP,
    IssuedOperation,
    clip_to_group,
    deduplicate_messages,
    issue_operation,
    issue_step,
    issue_unmatched,
    joint_operation,
    operations,
    optional_warm_step,
    require_works,
    several_ranks,
    unmatched_steps,
    wait_and_check,
    warm_links,
)
from equipoise.hal.conformance.fixtures.strategies import (
    offered,
    offers_any,
    one_common_size,
    operation_of,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import (
    DeadlineLength,
    Property,
    PropertyScope,
    Traits,
    all_of,
)
from equipoise.hal.errors import (
    CommunicatorFailed,
    EquipoiseError,
    OperationTimeout,
    ResultPending,
    StreamFailed,
)
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work

WAITING_ROLE, LATE_ROLE = Role.AUX, Role.COPY
"""The stream that waits for the operation, and one that comes when it has failed."""


def _stream_release_support(traits: Traits) -> str | None:
    """On a device that cannot end an operation, a stream that waits for it is blocked for good."""
    on_device = traits.comm_capabilities.stream_ordered and not traits.comm_capabilities.abort
    return PEERS_AND_MESSAGES(traits) or ("abort" if on_device else None)


def _failed_wait_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`lonely(...)`, then launches and recordings on the stream that waits for it.

    Not a round: each rank answers in its own way what it expects, so that what no rank sends can
    still meet something else, and end in an error of the device, which the stream never loses.
    """
    alone = unmatched_steps(traits).filter(lambda step: step.args[0] != "exchange")
    after = st.lists(st.sampled_from((Step("launch"), Step("record"))), max_size=3)
    return st.builds(
        lambda size, alone, steps: make_program([alone, *steps], size),
        one_common_size(traits),
        alone,
        after,
    )


def _play_failed_wait(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    waiting = ctx.accelerator.stream(WAITING_ROLE)
    alone, *steps = program.steps
    op, work = issue_unmatched(ctx, comm, alone)
    what = f"rank {ctx.rank}: a stream that waits for {op}, which fails,"
    refused = catch(partial(work.wait, waiting), CommunicatorFailed)
    yield NEXT
    flag = ctx.full((1,), 0)
    for step in steps:
        _use_failing_stream(ctx, waiting, step)
        yield NEXT
    yield Until(work.done, f"the failure of {op}")
    error = catch(partial(work.result, ctx.timeout), CommunicatorFailed)
    require("P3", error, f"rank {ctx.rank}: {op}, which nobody answers, ended well")
    if comm.capabilities.abort:
        comm.abort()  # a device blocks the stream until then: only this ends the operation
    if not refused:  # at the call it was not known yet
        failed = catch(partial(ctx.drain, waiting), StreamFailed)
        require("E10", failed, f"{what} is said to have drained")
        cause = failed.__cause__ if failed is not None else None
        require("E10", isinstance(cause, CommunicatorFailed), f"{what} blames {cause!r}")
        later = catch(partial(waiting.launch, partial(flag.fill_, 1)), StreamFailed)
        require("E10", later, f"{what} takes launches")
    late = ctx.accelerator.stream(LATE_ROLE)
    refused = catch(partial(work.wait, late), CommunicatorFailed)
    require("E10", refused, f"rank {ctx.rank}: waiting for {op}, which has failed, raises nothing")
    late.launch(partial(flag.fill_, 2))
    ctx.drain(late)
    require(
        "E10", int(to_host(flag)) == 2, "a stream that was refused a failed operation stands still"
    )


def _use_failing_stream(ctx: RankContext, stream: Stream, step: Step) -> None:
    """The stream may have failed by now."""
    if step.op == "launch":
        catch(partial(stream.launch, lambda: None), StreamFailed)
    else:
        catch(partial(stream.record, ctx.accelerator.event()), StreamFailed)


FAILED_WAITS = (
    Property(
        name="a-stream-that-waits-for-a-failed-work-fails",
        family="failures",
        clauses=("E10", "P3"),
        claim="It never drains well; what has failed already is refused, and the stream goes on.",
        programs=_failed_wait_programs,
        play=_play_failed_wait,
        needs=_stream_release_support,
        scope=PropertyScope.GROUP,
        deadline=DeadlineLength.SHORT,
    ),
)


FAMILY = "failures"
MAX_CLOSE_STEPS = 4


def _close_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Traffic, with a place where each rank closes: `rank r: close()`, or at the end."""
    close = st.builds(lambda rank: Step("close", (), rank), UNCLIPPED_RANKS)
    step = st.one_of(operations(traits), close)

    def build(size: int, steps: list[Step]) -> Program:
        clipped_steps = [replace(s, rank=s.rank % size) if s.op == "close" else s for s in steps]
        return make_program(deduplicate_messages(clip_to_group(clipped_steps, size)), size)

    return st.builds(
        build, one_common_size(traits), st.lists(step, min_size=1, max_size=MAX_CLOSE_STEPS)
    )


def _play_close(ctx: RankContext, program: Program) -> Play:
    """Issue until this rank closes; then every call raises, no wait blocks, nothing is written."""
    before = set(threading.enumerate())
    comm = yield from ctx.communicator()
    works: list[Work] = []
    sizes: list[int] = []
    for number, step in enumerate(program.steps):
        if step.op == "close" and step.rank == ctx.rank:
            break
        if step.op != "close":
            _keep_work_only(_issue_unless_failed(ctx, comm, step, number), works, sizes)
            yield NEXT
    ctx.environment.close(comm)
    junk = occupy_freed_memory(ctx, *sizes)
    yield NEXT
    refused = catch(lambda: issue_operation(ctx, comm, joint_operation(comm)), CommunicatorFailed)
    require("E5", refused, f"rank {ctx.rank}: issued on a communicator that was closed")
    for work in works:
        error = catch(lambda work=work: work.result(ctx.timeout), EquipoiseError)  # type: ignore[misc]
        waits = isinstance(error, ResultPending)
        require("E5", not waits, f"rank {ctx.rank}: a work in flight outlives the close: {error}")
    require_junk_untouched("E5", junk)
    _require_threads_ended(ctx, before)


def _issue_unless_failed(
    ctx: RankContext, comm: Communicator, step: Step, number: int
) -> IssuedOperation | None:
    """Issue, unless a peer that has closed has failed the communicator already."""
    outcome: list[IssuedOperation | None] = [None]
    catch(lambda: outcome.append(issue_step(ctx, comm, step, number)), CommunicatorFailed)
    return outcome[-1]


def _keep_work_only(transfer: IssuedOperation | None, works: list[Work], sizes: list[int]) -> None:
    """Keep the work and forget the buffers."""
    if transfer is not None:
        works.append(transfer.work)
        buffers = [*transfer.operands, *(output for output, _ in transfer.outputs)]
        sizes += [buffer.nbytes for buffer in buffers]


def _require_threads_ended(ctx: RankContext, before: set[threading.Thread]) -> None:
    """The threads that came with the communicator end with it; bounded."""
    later = [thread for thread in threading.enumerate() if thread not in before]
    for thread in later:
        thread.join(ctx.timeout)
    alive = [thread.name for thread in later if thread.is_alive()]
    require("E5", not alive, f"rank {ctx.rank}: threads that outlive the close: {alive}")


def _abort_support(traits: Traits) -> str | None:
    return PEERS_AND_MESSAGES(traits) or (None if traits.comm_capabilities.abort else "abort")


def _abort_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return st.builds(
        lambda n, step: make_program([step], n), one_common_size(traits), unmatched_steps(traits)
    )


def _play_abort(ctx: RankContext, program: Program) -> Play:
    other, comm = (yield from ctx.communicator("other")), (yield from ctx.communicator())
    op, work = issue_unmatched(ctx, comm, program.steps[0])
    yield NEXT
    comm.abort()
    error = yield from wait_for_outcome(ctx, work, f"{op}, which was aborted")
    what = f"rank {ctx.rank}: {op} that was aborted ended with {error!r}"
    require("E8", isinstance(error, CommunicatorFailed), what)
    require("E8", not isinstance(error, OperationTimeout), f"{what}: only its deadline ended it")
    refused = catch(lambda: issue_operation(ctx, comm, joint_operation(comm)), CommunicatorFailed)
    require("E8", refused, f"rank {ctx.rank}: issued on a communicator that was aborted")
    yield from require_works("X3", ctx, other, f"{comm.purpose!r} was aborted")


ENDS = (
    Property(
        name="closing-ends-what-is-in-flight",
        family=FAMILY,
        clauses=("E5",),
        claim="close returns, later calls raise, waits end, no thread and no late write is left.",
        programs=_close_programs,
        play=_play_close,
        needs=all_of(several_ranks, offers_any(*GROUP_OPS)),
        scope=PropertyScope.GROUP,
        deadline=DeadlineLength.SHORT,
    ),
    Property(
        name="abort-ends-what-is-in-flight",
        family=FAMILY,
        clauses=("E8", "X3"),
        claim="After abort every wait ends with an error, long before its deadline; what belongs "
        "to other communicators does not.",
        programs=_abort_programs,
        play=_play_abort,
        needs=_abort_support,
        scope=PropertyScope.GROUP,
    ),
)


MAX_SOFT_STEPS = 3
SOFT_TIMEOUT_FRACTION = 0.001
"""The part of the deadline that a soft wait may take."""
SENDER, RECEIVER = "sends", "receives"
"""Which end of a message gives up."""
LATE_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that no rank can end while another stays away."""


def _messages() -> st.SearchStrategy[Step]:
    """A message, and which of its ends gives up; not yet fitted."""
    end = st.sampled_from((SENDER, RECEIVER))
    return st.builds(
        lambda source, hop, nbytes, end: Step("message", (source, hop, nbytes, end)),
        UNCLIPPED_RANKS,
        UNCLIPPED_RANKS,
        st.sampled_from(ELEMENT_COUNTS),
        end,
    )


def _soft_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Messages, and collectives `op(elements, rank)` to which one rank comes late."""
    late_ops = offered(traits, LATE_COLLECTIVES)
    joint = st.builds(
        lambda op, count, late: Step(op, (count, late)),
        st.sampled_from(late_ops) if late_ops else st.nothing(),
        st.sampled_from(ELEMENT_COUNTS),
        UNCLIPPED_RANKS,
    )
    messages = _messages() if offered(traits, ("message",)) else st.nothing()
    step_lists = st.lists(messages | joint, min_size=1, max_size=MAX_SOFT_STEPS)

    def build(size: int, first: list[Step], steps: list[Step]) -> Program:
        shared = [_clip_late_rank(step, size) for step in steps if step.op == "message" or size > 1]
        return make_program([*first, *deduplicate_messages(clip_to_group(shared, size))], size)

    return st.builds(build, one_common_size(traits), optional_warm_step(), step_lists)


def _clip_late_rank(step: Step, size: int) -> Step:
    """A collective names the rank that comes late among those that there are."""
    if step.op == "message":
        return step
    return replace(step, args=(step.args[0], int(step.args[1]) % size))


def _play_soft(ctx: RankContext, program: Program) -> Play:
    """All ranks but one give up and say so; only then the last one comes."""
    comm = yield from ctx.communicator()
    warm_links(comm, program.steps)
    transfers: list[IssuedOperation | None] = []
    junk: list[Tensor] = []
    for number, step in enumerate(program.steps):
        if step == WARM_STEP:
            continue
        early, late = _parties(step, ctx.size)
        given_up = f"{comm.purpose}/step {number} was given up"
        if ctx.rank in early:
            transfer, sizes = _give_up(ctx, comm, step, number)
            transfers.append(transfer)
            junk += occupy_freed_memory(ctx, *sizes)
            control_plane(ctx).cast(given_up, b"")
        elif ctx.rank == late:
            yield from gather_ballots(ctx, given_up, early)
            transfers.append(issue_step(ctx, comm, step, number))
        yield NEXT
    yield from wait_and_check(ctx, transfers, "E3")


def _parties(step: Step, size: int) -> tuple[list[int], int]:
    """The thread that gives up, and the rank that comes late."""
    if step.op == "message":
        early, late = _message_parties(step)
        return [early], late
    late = int(step.args[1])
    return [rank for rank in range(size) if rank != late], late


def _message_parties(step: Step) -> tuple[int, int]:
    """The thread that gives up, and the rank that comes late."""
    source, target = int(step.args[0]), int(step.args[1])
    return (source, target) if step.args[3] == SENDER else (target, source)


def _give_up(
    ctx: RankContext, comm: Communicator, step: Step, number: int
) -> tuple[IssuedOperation | None, list[int]]:
    """Issue this rank's part and wait for a moment, in vain; what was to be sent is dropped.

    Returns what is still to arrive, and the sizes (bytes) of what was dropped.
    """
    transfer = issue_step(ctx, comm, step, number)
    if transfer is None:
        return None, []
    pending = catch(
        lambda: transfer.work.result(SOFT_TIMEOUT_FRACTION * ctx.deadline), ResultPending
    )
    require("E3", pending, f"{transfer.what}: ended before the last rank came")
    sizes = [operand.nbytes for operand in transfer.operands]
    return replace(transfer, operands=()), sizes


def _cancel_support(traits: Traits) -> str | None:
    declared = Operation.CANCEL in traits.comm_capabilities.operations
    return PEERS_AND_MESSAGES(traits) or (None if declared else "operations: cancel")


def _cancel_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return st.builds(
        lambda n, step: make_program(clip_to_group([step], n), n),
        one_common_size(traits),
        _messages(),
    )


def _play_cancel(ctx: RankContext, program: Program) -> Play:
    """The other end comes after the cancel; only when it has ended, the junk is looked at."""
    comm = yield from ctx.communicator()
    step = program.steps[0]
    canceller, other = _message_parties(step)
    cancelled, ended = (f"{comm.purpose}/{what}" for what in ("cancelled", "ended"))
    if ctx.rank == canceller:
        work = _cancel(ctx, comm, step)
        junk = occupy_freed_memory(ctx, int(step.args[2]))
        control_plane(ctx).cast(cancelled, b"")
        yield NEXT
        _require_cancelled(ctx, work)
        refusal = catch(
            lambda: issue_operation(ctx, comm, joint_operation(comm)), CommunicatorFailed
        )
        require("E4", refusal, f"rank {ctx.rank}: issued after a cancel as if nothing had happened")
        yield from gather_ballots(ctx, ended, [other])
        _require_cancelled(ctx, work)
        require_junk_untouched("E4", junk)
    elif ctx.rank == other:
        yield from gather_ballots(ctx, cancelled, [canceller])
        transfer = issue_step(ctx, comm, step, 0)
        if transfer is not None and (yield from wait_for_outcome(ctx, transfer.work)) is None:
            transfer.check_outputs("E4")
        control_plane(ctx).cast(ended, b"")


def _require_cancelled(ctx: RankContext, work: Work) -> None:
    """It has ended for its issuer, and has failed, whatever the other end does."""
    what = f"rank {ctx.rank}: an operation that was cancelled"
    require("E4", work.done(), f"{what} is not done")
    error = catch(lambda: work.result(0.0), CommunicatorFailed, ResultPending)
    description = f"{type(error).__name__}: {error}" if error else "nothing"
    require("E4", isinstance(error, CommunicatorFailed), f"{what}: its result raises {description}")


def _cancel(ctx: RankContext, comm: Communicator, step: Step) -> Work:
    """Issue, cancel, and drop the buffer."""
    transfer = issue_step(ctx, comm, step, 0)
    assert transfer is not None, "this rank is an end of the message"
    transfer.work.cancel()
    return transfer.work


GIVING_UP = (
    Property(
        name="result-timeout-does-not-cancel-the-operation",
        family=FAMILY,
        clauses=("E3",),
        claim="result(timeout) raises ResultPending; the operation lives on and owns its buffers.",
        programs=_soft_programs,
        play=_play_soft,
        needs=all_of(several_ranks, offers_any("message", *LATE_COLLECTIVES)),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="a-cancelled-operation-keeps-its-buffers-and-fails-its-communicator",
        family=FAMILY,
        clauses=("E4",),
        claim="A cancel ends the operation at once; nobody reads or writes memory that was freed.",
        programs=_cancel_programs,
        play=_play_cancel,
        needs=_cancel_support,
        scope=PropertyScope.GROUP,
        deadline=DeadlineLength.SHORT,
    ),
)


MAX_OPERATIONS = 3
PROBE_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""One of them must still work on a communicator that has nothing to do with the failure."""


def _unmatched_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`lonely(...)`, sound traffic on another communicator, and `later(op)` after the failure;
    perhaps between ranks that have links."""
    later = st.builds(
        lambda op: Step("later", (op,)),
        st.sampled_from(offered(traits, (*NEXT_RANK_OPS, *GROUP_OPS))),
    )
    sound, after = (
        st.lists(operations(traits), max_size=MAX_OPERATIONS),
        st.lists(later, max_size=MAX_OPERATIONS),
    )

    def build(
        size: int, first: list[Step], alone: Step, steps: list[Step], laters: list[Step]
    ) -> Program:
        return make_program(
            [*first, alone, *deduplicate_messages(clip_to_group(steps, size)), *laters], size
        )

    return st.builds(
        build, one_common_size(traits), optional_warm_step(), unmatched_steps(traits), sound, after
    )


def _play_unmatched(ctx: RankContext, program: Program) -> Play:
    broken = yield from ctx.communicator("broken")
    sound = yield from ctx.communicator("sound")
    if WARM_STEP in program.steps:
        broken.warm([(rank, (rank + 1) % broken.size) for rank in range(broken.size)])
    (alone,) = (step for step in program.steps if step.op == "lonely")
    op, work = issue_unmatched(ctx, broken, alone)
    transfers = []
    for number, step in enumerate(program.steps):
        if step.op not in ("warm", "lonely", "later"):
            transfers.append(issue_step(ctx, sound, step, number))
            yield NEXT
    yield from _require_other_communicator_works(ctx, transfers)
    yield from _require_named_failure(ctx, broken, op, work)
    for step in program.steps:
        if step.op == "later":
            _require_refusal(ctx, broken, str(step.args[0]))
            yield NEXT
    yield from _require_other_communicator_works(
        ctx, [issue_step(ctx, sound, _probe_step(sound), CLOSING_KEY)]
    )


def _probe_step(comm: Communicator) -> Step:
    declared = comm.capabilities.operations
    op = next(op for op in PROBE_OPS if operation_of(op) in declared)
    return Step(op, (UNMATCHED_BYTES,))


def _require_named_failure(ctx: RankContext, broken: Communicator, op: str, work: Work) -> Play:
    """The operation ends with an error, and the error says which operation, of what purpose."""
    error = yield from wait_for_outcome(ctx, work, f"{op}, which nobody answers")
    what = f"rank {ctx.rank}: {op} that nobody answered"
    require("P3", isinstance(error, CommunicatorFailed), f"{what} ended with {error!r}")
    is_named = op in str(error) and broken.purpose in str(error)
    require("E1", is_named, f"{what} of {broken.purpose!r}: the error says only {str(error)!r}")


def _require_refusal(ctx: RankContext, broken: Communicator, op: str) -> None:
    refusal = catch(lambda: issue_operation(ctx, broken, op), CommunicatorFailed)
    require("E2", refusal, f"rank {ctx.rank}: {op} was accepted by a communicator that had failed")


def _require_other_communicator_works(
    ctx: RankContext, transfers: list[IssuedOperation | None]
) -> Play:
    """What another communicator does ends well."""
    for transfer in transfers:
        if transfer is not None:
            error = yield from wait_for_outcome(ctx, transfer.work, transfer.what)
            require("X3", error is None, f"{transfer.what}, of another communicator: {error!r}")
            transfer.check_outputs("X3")


def _rebuild_support(traits: Traits) -> str | None:
    return PEERS_AND_MESSAGES(traits) or (None if traits.comm_capabilities.rebuild else "rebuild")


def _rebuild_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`leave(rank)` for those that are not among the survivors, then traffic of the survivors;
    before it perhaps `again`: a second failure, and a second rebuild."""
    leaving = st.lists(UNCLIPPED_RANKS, max_size=2, unique=True)
    steps = st.lists(operations(traits), min_size=1, max_size=MAX_OPERATIONS)
    whole = st.lists(_stale_like_messages(), max_size=MAX_OPERATIONS)
    again = st.sampled_from(([], [Step("again")]))

    def build(
        size: int,
        leaving_ranks: list[int],
        again: list[Step],
        steps: list[Step],
        like: list[Step],
    ) -> Program:
        leave = sorted({rank % size for rank in leaving_ranks})[: size - 1]
        survivors = size - len(leave)
        clipped_steps = deduplicate_messages(clip_to_group([*like, *steps], survivors))
        leaves = [Step("leave", (rank,)) for rank in leave]
        return make_program([*leaves, *(again if survivors > 1 else []), *clipped_steps], size)

    return st.builds(build, one_common_size(traits), leaving, again, steps, whole)


def _stale_like_messages() -> st.SearchStrategy[Step]:
    """Messages that one from before the failure could be taken for."""
    return st.builds(
        lambda source, hop: Step("message", (source, hop, UNMATCHED_BYTES)),
        UNCLIPPED_RANKS,
        UNCLIPPED_RANKS,
    )


def _play_rebuild(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    leavers = {int(step.args[0]) for step in program.steps if step.op == "leave"}
    yield from _send_in_vain(ctx, comm)
    if ctx.rank in leavers:
        return
    survivors = [rank for rank in range(ctx.size) if rank not in leavers]
    comm.rebuild(survivors)
    if Step("again") in program.steps:
        yield from _send_in_vain(ctx, comm)
        comm.rebuild(survivors)
    place = (comm.rank, comm.size)
    expected = (survivors.index(ctx.rank), len(survivors))
    require(
        "E9", place == expected, f"rank {ctx.rank} is rank {place[0]} of {place[1]}, not {expected}"
    )
    transfers = []
    for number, step in enumerate(program.steps):
        yield NEXT
        if step.op not in ("leave", "again"):
            transfers.append(issue_step(ctx, comm, step, number))
    yield from wait_and_check(ctx, transfers, "E9")


def _send_in_vain(ctx: RankContext, comm: Communicator) -> Play:
    """Fail the communicator by a message that nobody receives."""
    stale = issue_operation(ctx, comm, "isend")
    yield from wait_for_outcome(ctx, stale, "a message that nobody receives")


PROPERTIES = (
    Property(
        name="an-unmatched-operation-fails-only-its-communicator",
        clauses=("X3", "P3", "E1", "E2", "C8"),
        family=FAMILY,
        claim="Every rank's wait ends with an error that names operation and purpose.",
        programs=_unmatched_programs,
        play=_play_unmatched,
        needs=all_of(PEERS_AND_MESSAGES, offers_any(*PROBE_OPS)),
        scope=PropertyScope.GROUP,
        deadline=DeadlineLength.SHORT,
    ),
    Property(
        name="a-rebuilt-communicator-carries-only-what-came-after",
        clauses=("E9",),
        family=FAMILY,
        claim="After a failure the survivors rebuild, also again, and no older message arrives.",
        programs=_rebuild_programs,
        play=_play_rebuild,
        needs=_rebuild_support,
        scope=PropertyScope.GROUP,
        deadline=DeadlineLength.SHORT,
    ),
    *GIVING_UP,
    *FAILED_WAITS,
    *ENDS,
)
