"""Families *shapes* and *progress*: messages as large and as many as in real models.

Libraries choose other algorithms and protocols by size, and cut long messages into chunks.
"""

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Exchange, PeerBuffer
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    require_equal,
    wait_for_success,
)
from equipoise.hal.conformance.fixtures.collectives import (
    COPY_OPS,
    POINT_TO_POINT_OPS,
    REDUCE_OPS,
    CollectiveCall,
    PlainBuffers,
    dtype_name,
    dtype_named,
    require_inputs_kept,
    require_results,
    run_calls,
)
from equipoise.hal.conformance.fixtures.comm_operations import (
    IssuedOperation,
    issue_step,
    several_ranks,
    wait_and_check,
)
from equipoise.hal.conformance.fixtures.strategies import (
    copyable_dtypes,
    offered,
    offers,
    offers_any,
    one_common_size,
    reducible_dtypes,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties.kernels_large import random_bytes
from equipoise.hal.conformance.property import Property, PropertyScope, Traits, all_of

COPY_BYTES = (65_537, (1 << 20) + 1)
"""Elements that a rank gives: bytes at each size, other dtypes at the first."""
REDUCE_ELEMENTS = (4095, 65_536, (1 << 18) + 1)
"""Elements of a sum: the first two dtypes at each size, the others at the first."""
LARGE_ROW_COUNT, ROW_BYTES = 4099, 5
"""Rows of an uneven all-to-all that one rank gives, and bytes of each."""
MESSAGE_BYTES = (65_535, (1 << 20) + 1, (4 << 20) + 3)
"""Bytes of a message, and of a blob."""
MESSAGES_IN_FLIGHT = 130
"""Messages of one rank to another before any is waited for."""
OPERATIONS, WINDOW = 260, 40
"""Operations of each kind on one communicator, and how many of them are in flight at once."""
REPEATED_OPS = ("message", *(op for op in (*COPY_OPS, *REDUCE_OPS) if op not in POINT_TO_POINT_OPS))
"""Kinds of operations that one communicator serves hundreds of."""


def _values(call: CollectiveCall, sender: int, receiver: int) -> Tensor:
    """Any bytes where they are moved, small numbers where they are added."""
    key = 97 * call.key + 13 * sender + receiver
    count = torch.Size(call.shape).numel()
    if call.op in REDUCE_OPS:
        return (random_bytes(count, key) % 16).to(call.dtype)
    return random_bytes(call.nbytes, key).view(call.dtype).view(call.shape)


def _dtypes_by_size(traits: Traits, key: int) -> list[torch.dtype]:
    """Bytes, and one dtype of every other item size: what is moved depends on that alone."""
    by_size: dict[int, list[torch.dtype]] = {}
    for dtype in copyable_dtypes(traits):
        by_size.setdefault(dtype.itemsize, []).append(dtype)
    return [some[key % len(some) if size > 1 else 0] for size, some in sorted(by_size.items())]


def _collectives(traits: Traits) -> st.SearchStrategy[Program]:
    """`operation(key)` of every kind, each at every size; `key` draws the contents."""

    def build(size: int, key: int) -> Program:
        every = offered(traits, (*COPY_OPS, *REDUCE_OPS))
        ops = [op for op in every if size > 1 or op not in POINT_TO_POINT_OPS]
        kinds = {"moved": _dtypes_by_size(traits, key), "summed": reducible_dtypes(traits)}
        names = {name: "+".join(map(dtype_name, some)) for name, some in kinds.items()}
        return make_program([Step(op, (key + place,)) for place, op in enumerate(ops)], size, names)

    return st.builds(build, one_common_size(traits), st.integers(0, 255))


def _calls(program: Program, step: Step) -> list[CollectiveCall]:
    """The calls of a step: every dtype at the smallest size, the first of them at all."""
    sums = step.op in REDUCE_OPS
    sizes, at_all = (REDUCE_ELEMENTS, 2) if sums else (COPY_BYTES, 1)
    names = str(program.setting("summed" if sums else "moved")).split("+")
    (key,) = (int(number) for number in step.args)
    source = key % program.size if step.op == "broadcast" else 0
    return [
        CollectiveCall(step.op, dtype_named(name), (count,), source, key)
        for place, name in enumerate(names)
        if name
        for count in (sizes if place < at_all else sizes[:1])
    ]


def _play_collectives(ctx: RankContext, program: Program) -> Play:
    """One after another; compared at the end, so a rank that sees an error strands no other."""
    comm = yield from ctx.communicator()
    issued = []
    for step in program.steps:
        for call in _calls(program, step):
            issued += yield from run_calls(ctx, comm, [call], PlainBuffers(ctx), _values)
    require_results("X4", comm, issued, _values)
    require_inputs_kept("X4", comm, issued)


def _uneven_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`uneven(key)`: the first rank gives nearly all of its rows to the last, others few."""
    return st.builds(
        lambda size, key: make_program([Step("uneven", (key,))], size),
        one_common_size(traits),
        st.integers(0, 255),
    )


def _rows(sender: int, receiver: int, size: int) -> int:
    return LARGE_ROW_COUNT if (sender, receiver) == (0, size - 1) else (sender + 2 * receiver) % 3


def _play_uneven(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    (key,) = (int(number) for number in program.steps[0].args)
    size, rank = comm.size, comm.rank
    sends = [_rows(rank, receiver, size) for receiver in range(size)]
    receives = [_rows(sender, rank, size) for sender in range(size)]

    def block(sender: int, receiver: int) -> Tensor:
        rows = _rows(sender, receiver, size)
        return random_bytes(rows * ROW_BYTES, key + size * sender + receiver).view(rows, ROW_BYTES)

    operand = ctx.copy_of(torch.cat([block(rank, receiver) for receiver in range(size)]))
    out = ctx.empty((sum(receives), ROW_BYTES))
    yield from wait_for_success(ctx, comm.all_to_all_uneven(out, operand, receives, sends))
    expected = torch.cat([block(sender, rank) for sender in range(size)])
    require_equal("S3", out, expected, f"rank {rank}: {sum(receives)} rows of {receives}")


def _messages(traits: Traits) -> st.SearchStrategy[Program]:
    """`message` and `exchange` of every length, from rank 0 to rank 1; `key` draws the bytes."""

    def build(size: int, key: int) -> Program:
        return make_program(
            [Step("long", (length, key + k)) for k, length in enumerate(MESSAGE_BYTES)], size
        )

    return st.builds(build, one_common_size(traits), st.integers(0, 255))


def _play_messages(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    outputs: list[tuple[Tensor, Tensor, str]] = []
    for step in program.steps:
        length, key = (int(number) for number in step.args)
        message, blob = random_bytes(length, key), random_bytes(length, key + 1)
        if comm.rank == 0:
            # Kept until they have arrived: that a message owns its buffer is judged elsewhere (K1).
            buffer, outgoing = ctx.copy_of(message), PeerBuffer(1, ctx.copy_of(blob))
            first = comm.isend(buffer, 1)
            second = comm.exchange(Exchange((outgoing,), ()))
            for work in (first, second):
                yield from wait_for_success(ctx, work)
        elif comm.rank == 1:
            out, part = ctx.empty((length,)), ctx.empty((length,))
            first = comm.irecv(out, 0)
            second = comm.exchange(Exchange((), (PeerBuffer(0, part),)))
            for work in (first, second):
                yield from wait_for_success(ctx, work)
            outputs.append((out, message, f"a message of {length} bytes"))
            outputs.append((part, blob, f"a blob of {length} bytes"))
    for output, expected, what in outputs:
        require_equal("S1", output, expected, what)


def _many_messages(traits: Traits) -> st.SearchStrategy[Program]:
    """`crowd(count, key)`: that many messages each way; `key` draws their lengths."""
    return st.builds(
        lambda size, key: make_program([Step("crowd", (MESSAGES_IN_FLIGHT, key))], size),
        one_common_size(traits),
        st.integers(0, 255),
    )


def _play_many_messages(ctx: RankContext, program: Program) -> Play:
    """All of them in flight at once, both ways between the first two ranks."""
    comm = yield from ctx.communicator()
    count, key = (int(number) for number in program.steps[0].args)
    transfers: list[IssuedOperation | None] = []
    for number in range(count):
        length = 1 + (key + 7 * number) % 40
        for ends in ((0, 1), (1, 0)):
            transfers.append(issue_step(ctx, comm, Step("message", (*ends, length)), number))
        yield NEXT
    yield from wait_and_check(ctx, transfers, "P2")


def _many_operations(traits: Traits) -> st.SearchStrategy[Program]:
    """`each(kind, ...)`: so many operations of each kind, in turn."""
    kinds = tuple(offered(traits, REPEATED_OPS))
    return st.builds(
        lambda size: make_program([Step("each", (OPERATIONS, *kinds))], size),
        one_common_size(traits),
    )


def _play_many_operations(ctx: RankContext, program: Program) -> Play:
    """A window of them is in flight, and ends before the next."""
    comm = yield from ctx.communicator()
    count, *kinds = program.steps[0].args
    in_flight: dict[str, list[IssuedOperation | None]] = {"P2": [], "X4": []}
    for number in range(int(count)):
        for kind in map(str, kinds):
            rest = {"message": (0, 1, 4), "broadcast": (4, number % comm.size)}.get(kind, (4,))
            transfer = issue_step(ctx, comm, Step(kind, rest), number)
            in_flight["P2" if kind == "message" else "X4"].append(transfer)
        if (number + 1) % WINDOW == 0:
            yield from _finish(ctx, in_flight)
    yield from _finish(ctx, in_flight)


def _finish(ctx: RankContext, in_flight: dict[str, list[IssuedOperation | None]]) -> Play:
    for clause, transfers in in_flight.items():
        yield from wait_and_check(ctx, transfers, clause)
        transfers.clear()


SHAPES = (
    Property(
        name="collectives-equal-their-definitions-at-any-size",
        family="shapes",
        clauses=("X4",),
        claim="So do collectives of thousands and of millions of elements.",
        programs=_collectives,
        play=_play_collectives,
        needs=offers_any(*COPY_OPS, *REDUCE_OPS),
        scope=PropertyScope.GROUP,
        large=True,
    ),
    Property(
        name="thousands-of-uneven-rows-arrive",
        family="shapes",
        clauses=("S3",),
        claim="One rank gives thousands of rows to another, and few or none to the rest.",
        programs=_uneven_programs,
        play=_play_uneven,
        needs=offers("all_to_all_uneven"),
        scope=PropertyScope.GROUP,
        large=True,
    ),
    Property(
        name="long-messages-arrive-whole",
        family="shapes",
        clauses=("S1",),
        claim="Messages and blobs of megabytes arrive, at chunk borders and beside them.",
        programs=_messages,
        play=_play_messages,
        needs=all_of(several_ranks, offers("message", "exchange")),
        scope=PropertyScope.GROUP,
        large=True,
    ),
)
PROGRESS = (
    Property(
        name="many-messages-in-flight-match-in-order",
        family="progress",
        clauses=("P2",),
        claim="Messages between two ranks are matched in order, however many are in flight.",
        programs=_many_messages,
        play=_play_many_messages,
        needs=all_of(several_ranks, offers("message")),
        scope=PropertyScope.GROUP,
        large=True,
    ),
    Property(
        name="a-communicator-serves-hundreds-of-operations",
        family="progress",
        clauses=("X4", "P2"),
        claim="The hundreds of operations of a long run are all as good as the first.",
        programs=_many_operations,
        play=_play_many_operations,
        needs=all_of(several_ranks, offers_any(*REPEATED_OPS)),
        scope=PropertyScope.GROUP,
        large=True,
    ),
)
