"""Family *progress*: sends, matching order, independent communicators, streams that wait.

Also rounds of blobs, links that are built ahead, and collectives whose output overlaps their input.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    Until,
    catch,
    require,
    require_equal,
    sync_current_stream,
    wait_for_success,
)
from equipoise.hal.conformance.fixtures.collectives import (
    CollectiveCall,
    collective_input,
    expected_result,
    small_integers,
)
from equipoise.hal.conformance.fixtures.comm_operations import (
    ALL_OPS,
    GROUP_OPS,
    SINGLE_WORK_OPS,
    UNCLIPPED_RANKS,
    IssuedOperation,
    call_for_step,
    clip_to_group,
    clipped_programs,
    deduplicate_messages,
    int_arguments,
    issue_operation,
    issue_step,
    joint_operation,
    message_triples,
    operations,
    optional_warm_step,
    payload,
    require_works,
    several_ranks,
    shared_communicators,
    thread_future,
    wait_and_check,
    warm_links,
)
from equipoise.hal.conformance.fixtures.strategies import (
    offered,
    offers,
    offers_any,
    one_common_size,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties.large_collectives import PROGRESS as CROWDS
from equipoise.hal.conformance.property import (
    Property,
    PropertyScope,
    Traits,
    all_of,
    independent_groups,
)
from equipoise.hal.errors import Unsupported
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work

FAMILY = "progress"
_MESSAGES = all_of(several_ranks, offers("message"))
MAX_ROUNDS = 4


def _round_programs(traits: Traits) -> st.SearchStrategy[Program]:
    empty = st.lists(st.booleans(), min_size=MAX_ROUNDS, max_size=MAX_ROUNDS)
    step = st.builds(_with_empty, operations(traits, ("exchange",)), empty)
    return clipped_programs(traits, st.lists(step, min_size=1, max_size=MAX_ROUNDS))


def _with_empty(step: Step, empty: list[bool]) -> Step:
    """The round with some of its blobs of no bytes."""
    blobs = message_triples(int_arguments(step))
    sized = [(s, t, 0 if empty[place % MAX_ROUNDS] else n) for place, (s, t, n) in enumerate(blobs)]
    return Step(step.op, tuple(number for blob in sized for number in blob))


def _play_rounds(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    for number, step in enumerate(program.steps):
        yield from wait_and_check(ctx, [issue_step(ctx, comm, step, number)], "X1")


def _warm_programs(traits: Traits) -> st.SearchStrategy[Program]:
    links = st.lists(st.tuples(UNCLIPPED_RANKS, UNCLIPPED_RANKS, st.just(0)), max_size=6)
    messages = st.lists(operations(traits, ("message",)), min_size=1, max_size=MAX_ROUNDS)

    def build(size: int, pairs: list[tuple[int, int, int]], steps: list[Step]) -> Program:
        warm = [Step("message", pair) for pair in pairs]
        flat = [n for step in clip_to_group(warm, size) for n in int_arguments(step)[:2]]
        return make_program(
            [Step("warm", tuple(flat)), *deduplicate_messages(clip_to_group(steps, size))], size
        )

    return st.builds(build, one_common_size(traits), links, messages)


def _play_warm(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    ends = int_arguments(program.steps[0])
    yield NEXT
    comm.warm(tuple(zip(ends[::2], ends[1::2], strict=True)))
    transfers = []
    for number, step in enumerate(program.steps[1:]):
        transfers.append(issue_step(ctx, comm, step, number))
        yield NEXT
    yield from wait_and_check(ctx, transfers, "X2")


ROUNDS = (
    Property(
        name="a-round-brings-every-blob-whole",
        family=FAMILY,
        clauses=("X1",),
        claim="One blob a pair, of any size, empty ones among them; rounds follow each other.",
        programs=_round_programs,
        play=_play_rounds,
        needs=all_of(several_ranks, offers("exchange")),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="links-warmed-in-one-order-carry-traffic",
        family=FAMILY,
        clauses=("X2",),
        claim="After all ranks have warmed the same links, in one order, messages arrive.",
        programs=_warm_programs,
        play=_play_warm,
        needs=_MESSAGES,
        scope=PropertyScope.GROUP,
    ),
)


THREADS = 2
MAX_STREAM_OPERATIONS = 4
ROLES = tuple(role.value for role in Role)
INITIAL_BYTE = 0x11
"""What buffers hold, and are set to late, before the operation may touch them."""


def _stream_order_support(traits: Traits) -> str | None:
    return None if traits.comm_capabilities.stream_ordered else "stream_ordered"


def _ordered_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`message(source, target, nbytes, s, t)`: what streams are current for the thread that issues
    it, at the source and at the target; `outer` are those that stay current for the threads."""
    role = st.sampled_from(ROLES[:2])
    step = st.builds(
        lambda step, s, t, thread: replace(step, args=(*step.args, s, t), thread=thread),
        operations(traits, ("message",)),
        role,
        role,
        st.integers(0, THREADS - 1),
    )

    def build(size: int, first: list[Step], steps: list[Step], outer: Sequence[str]) -> Program:
        messages = deduplicate_messages(clip_to_group(steps, size))
        return make_program([*first, *messages], size, {"outer": "+".join(outer[:THREADS])})

    step_lists = st.lists(step, min_size=1, max_size=2 * MAX_STREAM_OPERATIONS)
    first, outer = optional_warm_step(), st.permutations(ROLES[:2])
    return st.builds(build, one_common_size(traits), first, step_lists, outer)


@dataclass(frozen=True)
class _Turns:
    """The threads of a rank issue the steps in the order of the program.

    Attributes:
        ctx: the context of one of them.
        issued: by step, whether it was issued.
    """

    ctx: RankContext
    issued: list[threading.Event]

    def wait_for(self, number: int) -> Play:
        """Wait until every step before was issued; to be used with `yield from`."""
        if number:
            before = self.issued[number - 1]
            yield Until(before.is_set, f"the turn of step {number}")
            came = before.wait(self.ctx.timeout)
            require("C8", came, f"the turn of step {number} never came")

    def end(self, number: int) -> None:
        """The next one may be issued."""
        self.issued[number].set()


def _turns(ctx: RankContext, steps: Sequence[Step]) -> _Turns:
    fresh = [threading.Event() for _ in steps]
    return _Turns(ctx, ctx.shared.setdefault("issued", fresh))


def _play_ordered(ctx: RankContext, program: Program) -> Play:
    """Each thread has a stream that stays current for it, and another one within that for the
    messages that name another. What one thread makes current is not so for the other."""
    outer = Role(str(program.setting("outer")).split("+")[ctx.thread])
    entered, opened = thread_future(ctx, "entered"), thread_future(ctx, "opened")
    steps = [step for step in program.steps if step.op == "message"]
    turns, transfers = _turns(ctx, steps), []
    if ctx.thread == 0:
        yield from entered.wait_for_result(ctx, "the current stream of the other thread")
    with ctx.accelerator.stream(outer).current():
        if ctx.thread == 1:
            entered.set_result()
        if ctx.thread == 0:
            comm = yield from ctx.communicator()
            warm_links(comm, program.steps)
            opened.set_result(comm)
        comm = yield from opened.wait_for_result(ctx, "the communicator of the rank")
        for number, step in enumerate(steps):
            if step.thread == ctx.thread:
                yield from turns.wait_for(number)
                if ctx.rank in int_arguments(step)[:2]:
                    transfers.append(_issue_late(ctx, comm, (step, number), outer))
                turns.end(number)
                yield NEXT
    yield from wait_and_check(ctx, transfers, "X6")


def _issue_late(
    ctx: RankContext, comm: Communicator, order: tuple[Step, int], outer: Role
) -> IssuedOperation:
    """Launch the last write of the buffer, and issue the message after it."""
    source, target, nbytes = int_arguments(order[0])
    data = payload(order[1], source, target, nbytes)
    buffer, operand = ctx.full((nbytes,), INITIAL_BYTE), ctx.copy_of(data)
    role = Role(str(order[0].args[3 + (ctx.rank == target)]))
    stream = ctx.accelerator.stream(role)
    ctx.inject_delay(stream)
    with ctx.accelerator.stream(Role.AUX).current():
        pass  # what was current before is so again
    with nullcontext() if role == outer else stream.current():
        if ctx.rank == target:
            stream.launch(lambda: buffer.fill_(INITIAL_BYTE))
            return IssuedOperation(str(order[0]), comm.irecv(buffer, source), ((buffer, data),))
        stream.launch(lambda: buffer.copy_(operand))
        work = comm.isend(buffer, target)
    return IssuedOperation(str(order[0]), work, operands=(buffer, operand))


def _awaited_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Operations, and `await(place, role)`: a stream waits for the operation in that place."""
    awaits = st.builds(
        lambda *args: Step("await", args),
        st.integers(0, MAX_STREAM_OPERATIONS - 1),
        st.sampled_from(ROLES),
    )
    step = st.one_of(operations(traits), awaits)

    def build(size: int, steps: list[Step]) -> Program:
        valid = _valid_awaits(deduplicate_messages(clip_to_group(steps, size)))
        if traits.accelerator.streams == 1:  # such a stream may run launches inside the call
            valid = _awaits_last(valid)
        return make_program(valid, size)

    return st.builds(
        build,
        one_common_size(traits),
        st.lists(step, min_size=2, max_size=2 * MAX_STREAM_OPERATIONS),
    )


def _valid_awaits(steps: list[Step]) -> list[Step]:
    """Each *await* names the place of an operation before it."""
    valid: list[Step] = []
    for step in steps:
        if step.op == "await":
            issued = [place for place, earlier in enumerate(valid) if earlier.op != "await"]
            if not issued:
                continue
            step = Step("await", (issued[int(step.args[0]) % len(issued)], step.args[1]))
        valid.append(step)
    return valid


def _awaits_last(steps: list[Step]) -> list[Step]:
    """All operations first; places follow."""
    places = [place for place, step in enumerate(steps) if step.op != "await"]
    moved = {place: number for number, place in enumerate(places)}
    awaits = [s for s in steps if s.op == "await"]
    after = [Step("await", (moved[int(s.args[0])], s.args[1])) for s in awaits]
    return [steps[place] for place in places] + after


@dataclass
class _Copies:
    """What streams saw that had waited for an operation."""

    ctx: RankContext
    pairs: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)

    def copy_after(self, transfer: IssuedOperation, stream: Stream) -> None:
        """Copy the results after the operation, on the stream."""
        transfer.work.wait(stream)
        for output, expected in transfer.outputs:
            result_copy = self.ctx.full(output.shape, INITIAL_BYTE, output.dtype)
            stream.launch(lambda result_copy=result_copy, output=output: result_copy.copy_(output))  # type: ignore[misc]
            self.pairs.append(
                (result_copy, expected, f"{transfer.what}, seen by a stream that waited")
            )

    def check(self) -> None:
        """Demand that all saw the end."""
        for result_copy, expected, what in self.pairs:
            require_equal("X7", result_copy, expected, what)


def _play_awaited(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    transfers: dict[int, IssuedOperation] = {}
    copies = _Copies(ctx)
    for number, step in enumerate(program.steps):
        if step.op != "await":
            if (transfer := issue_step(ctx, comm, step, number)) is not None:
                transfers[number] = transfer
        elif step.args[0] in transfers:
            stream = ctx.accelerator.stream(Role(str(step.args[1])))
            copies.copy_after(transfers[int(step.args[0])], stream)
        yield NEXT
    for transfer in transfers.values():
        yield Until(transfer.work.done, transfer.what)
    ctx.drain()
    copies.check()


STREAMED = (
    Property(
        name="operations-are-ordered-after-the-current-stream",
        family=FAMILY,
        clauses=("X6",),
        claim="What was launched on the thread's current stream before a message comes before it.",
        programs=_ordered_programs,
        play=_play_ordered,
        needs=all_of(_MESSAGES, _stream_order_support),
        scope=PropertyScope.GROUP,
        threads=THREADS,
    ),
    Property(
        name="a-stream-waits-for-an-operation-without-the-host",
        family=FAMILY,
        clauses=("X7",),
        claim="What a stream does after waiting sees the result; the host is not held up.",
        programs=_awaited_programs,
        play=_play_awaited,
        needs=all_of(several_ranks, offers_any(*ALL_OPS)),
        scope=PropertyScope.GROUP,
    ),
)


MAX_IN_PLACE_CALLS = 3
OVERLAPPING_OPS = ("all_gather", "reduce_scatter", "all_to_all")
OVERLAPS = ("same", "shifted")
"""*same*: the smaller operand is this rank's part of the larger one, or both are one.
*shifted*: the output begins one element after the input, so it is in place on no rank."""
OVERLAPPING_COUNTS = (4, 33)


def _in_place_programs(traits: Traits) -> st.SearchStrategy[Program]:
    step = st.builds(
        lambda op, count, overlap: Step(op, (count, overlap)),
        st.sampled_from(offered(traits, OVERLAPPING_OPS)),
        st.sampled_from(OVERLAPPING_COUNTS),
        st.sampled_from(OVERLAPS),
    )
    step_lists = st.lists(step, min_size=1, max_size=MAX_IN_PLACE_CALLS)
    return st.builds(
        lambda size, steps: make_program(steps, size), one_common_size(traits), step_lists
    )


def _play_in_place(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    for number, step in enumerate(program.steps):
        yield NEXT
        yield from _play_overlapping(ctx, comm, call_for_step(step, number), str(step.args[1]))


def _play_overlapping(
    ctx: RankContext, comm: Communicator, call: CollectiveCall, overlap: str
) -> Play:
    """Either it equals the collective without overlap, or nothing happens."""
    values = collective_input(call, comm.rank, comm.size, small_integers)
    expected = expected_result(call, comm.rank, comm.size, small_integers)
    out, tensor = _operands(ctx, comm.rank, values, expected, overlap)
    sync_current_stream(tensor.copy_(values))
    works: list[Work] = []
    what = f"rank {comm.rank}: {call}, output and input {overlap}"
    refused = catch(
        lambda: works.append(_issue_overlapping(comm, call.op, out, tensor)), Unsupported
    )
    if refused is not None:
        require_equal("A3", tensor, values, f"{what}: the input after the refusal")
        return
    yield from wait_for_success(ctx, works[0], what)
    require_equal("A3", out, expected, what)


def _issue_overlapping(comm: Communicator, op: str, out: Tensor, tensor: Tensor) -> Work:
    calls = {
        "all_gather": comm.all_gather,
        "reduce_scatter": comm.reduce_scatter,
        "all_to_all": comm.all_to_all,
    }
    return calls[op](out, tensor)


def _operands(
    ctx: RankContext, rank: int, values: Tensor, expected: Tensor, overlap: str
) -> tuple[Tensor, Tensor]:
    """Output and input of these shapes, in one piece of memory."""
    if overlap == "shifted":
        return _shifted_operands(ctx, values, expected)
    if values.numel() > expected.numel():
        whole = ctx.empty(values.shape, values.dtype)
        return whole[rank], whole
    whole = ctx.empty(expected.shape, expected.dtype)
    if values.numel() == expected.numel():
        return whole, whole.view(values.shape)
    return whole, whole[rank]


def _shifted_operands(ctx: RankContext, values: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    whole = ctx.empty((max(values.numel(), 1 + expected.numel()),), values.dtype)
    tensor = whole[: values.numel()].view(values.shape)
    return whole[1 : 1 + expected.numel()].view(expected.shape), tensor


OVERLAPPING_OPERANDS = (
    Property(
        name="overlapping-operands-are-as-good-as-separate-ones-or-refused",
        family=FAMILY,
        clauses=("A3",),
        claim="A collective whose output overlaps its input gives the same, or does nothing.",
        programs=_in_place_programs,
        play=_play_in_place,
        needs=offers_any(*OVERLAPPING_OPS),
        scope=PropertyScope.GROUP,
    ),
)


MAX_OPERATIONS = 8
ORDER_REVEALING_OPS = ("message", "message", "all_reduce", "broadcast")
"""What shows that two threads' operations were swapped: mostly messages."""
PURPOSES = tuple(f"one of two whose names have most letters in common, number {k}" for k in "12")
"""Two communicators; thread k uses the k-th. Libraries cut long names."""


def _ring_programs(traits: Traits) -> st.SearchStrategy[Program]:
    step_lists = st.lists(operations(traits, ("message",)), min_size=1, max_size=MAX_OPERATIONS)
    return st.builds(
        lambda n, steps: make_program(deduplicate_messages(clip_to_group(steps, n)), n),
        one_common_size(traits),
        step_lists,
    )


def _play_ring(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    transfers: list[IssuedOperation | None] = []
    for end in (0, 1):  # all sends before any receive
        for number, step in enumerate(program.steps):
            if int_arguments(step)[end] == ctx.rank:
                transfers.append(issue_step(ctx, comm, step, number))
                yield NEXT
    yield from wait_and_check(ctx, transfers, "P1")


def _order_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return clipped_programs(
        traits, st.lists(operations(traits, ("message",)), min_size=2, max_size=MAX_OPERATIONS)
    )


def _play_order(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    transfers = []
    for number, step in enumerate(program.steps):
        transfers.append(issue_step(ctx, comm, step, number))
        yield NEXT
    yield from wait_and_check(ctx, transfers, "P2")


def _operations_by_thread(
    traits: Traits, most: int, kinds: Sequence[str]
) -> st.SearchStrategy[list[Step]]:
    """Operations, each issued by one thread of every rank."""
    thread = st.integers(0, THREADS - 1)
    step_of_thread = st.builds(
        lambda step, thread: replace(step, thread=thread), operations(traits, kinds), thread
    )
    return st.lists(step_of_thread, min_size=2, max_size=most)


def _groups_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return st.builds(
        lambda n, steps: make_program(_deduplicate_by_thread(clip_to_group(steps, n)), n),
        one_common_size(traits),
        _operations_by_thread(traits, 6, SINGLE_WORK_OPS),
    )


def _deduplicate_by_thread(steps: list[Step]) -> list[Step]:
    """In either communicator at most one message from a rank to another."""
    return [
        step
        for thread in range(THREADS)
        for step in deduplicate_messages(s for s in steps if s.thread == thread)
    ]


def _play_groups(ctx: RankContext, program: Program) -> Play:
    groups = yield from shared_communicators(ctx, *PURPOSES)
    transfers = []
    for number, step in enumerate(program.steps):
        if step.thread == ctx.thread:
            transfers.append(issue_step(ctx, groups[PURPOSES[ctx.thread]], step, number))
            yield NEXT
    yield from wait_and_check(ctx, transfers, "P4")


def _turns_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return clipped_programs(
        traits, _operations_by_thread(traits, MAX_OPERATIONS, ORDER_REVEALING_OPS)
    )


def _play_turns(ctx: RankContext, program: Program) -> Play:
    groups, turns = (yield from shared_communicators(ctx, "main")), _turns(ctx, program.steps)
    transfers = []
    for number, step in enumerate(program.steps):
        if step.thread != ctx.thread:
            continue
        yield from turns.wait_for(number)
        transfers.append(issue_step(ctx, groups["main"], step, number))
        turns.end(number)
        yield NEXT
    yield from wait_and_check(ctx, transfers, "P6")


def _early_close_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`leave(rank)`: ranks that close what they have just opened."""
    leaving = st.lists(UNCLIPPED_RANKS, min_size=1, max_size=MAX_OPERATIONS, unique=True)

    def build(size: int, leaving_ranks: Sequence[int]) -> Program:
        ranks = sorted({rank % size for rank in leaving_ranks})
        return make_program([Step("leave", (rank,)) for rank in ranks], size)

    return st.builds(build, one_common_size(traits), leaving)


def _play_early_close(ctx: RankContext, program: Program) -> Play:
    """Any error of an opening, or of an operation afterwards, is a violation."""
    before = yield from ctx.communicator("before")
    comm = yield from ctx.communicator("left early")
    if Step("leave", (ctx.rank,)) in program.steps:
        ctx.environment.close(comm)
    yield from require_works("X3", ctx, before, f"{comm.purpose!r} was closed")
    after = yield from ctx.communicator("after")
    op = joint_operation(after)
    yield from wait_for_success(
        ctx, issue_operation(ctx, after, op), f"{op} of the communicator opened afterwards"
    )


PROPERTIES = (
    Property(
        name="sends-need-not-wait-for-receives",
        family=FAMILY,
        clauses=("P1",),
        claim="Everybody sends everything before receiving anything, and all of it arrives.",
        programs=_ring_programs,
        play=_play_ring,
        needs=_MESSAGES,
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="messages-between-two-ranks-keep-their-order",
        family=FAMILY,
        clauses=("P2",),
        claim="The k-th receive from a rank takes the k-th message that it sent, of any size.",
        programs=_order_programs,
        play=_play_order,
        needs=_MESSAGES,
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="communicators-progress-independently",
        family=FAMILY,
        clauses=("P4",),
        claim="A host for each communicator: in whatever order they issue, everything ends.",
        programs=_groups_programs,
        play=_play_groups,
        needs=all_of(several_ranks, offers_any(*SINGLE_WORK_OPS), independent_groups),
        scope=PropertyScope.GROUP,
        threads=THREADS,
    ),
    Property(
        name="threads-take-turns-on-one-communicator",
        family=FAMILY,
        clauses=("P6",),
        claim="Operations keep the order in which a rank's threads issued them.",
        programs=_turns_programs,
        play=_play_turns,
        needs=all_of(several_ranks, offers_any(*ORDER_REVEALING_OPS)),
        scope=PropertyScope.GROUP,
        threads=THREADS,
    ),
    Property(
        name="a-rank-may-close-what-it-has-just-opened",
        family=FAMILY,
        clauses=("X8", "X3"),
        claim="Ranks that close a communicator as soon as they have it take nobody's opening away, "
        "and no other communicator.",
        programs=_early_close_programs,
        play=_play_early_close,
        needs=all_of(several_ranks, offers_any(*GROUP_OPS)),
        scope=PropertyScope.GROUP,
    ),
    *CROWDS,
    *ROUNDS,
    *STREAMED,
    *OVERLAPPING_OPERANDS,
)
