"""Family *control*: checked mode reports operations that differ between ranks, starts none."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st

from equipoise.hal.checked_communicator import CheckedCommunicator
from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.context import (
    Play,
    RankContext,
    control_plane,
    gather_ballots,
    require,
)
from equipoise.hal.conformance.fixtures.collectives import (
    COPY_OPS,
    REDUCE_OPS,
    CollectiveCall,
    PlainBuffers,
    dtype_named,
    issue_call,
    parse_shape,
    require_results,
)
from equipoise.hal.conformance.fixtures.strategies import (
    any_collective_step,
    common_sizes,
    offers_any,
    programs_by_size,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import Property, PropertyScope, Traits
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, OrderMismatch, RankLost

CHECKED = CheckedCommunicator
EPOCH = 7
MAX_STEPS = 6
OPS = tuple(op for op in (*COPY_OPS, *REDUCE_OPS) if op != "shift")
"""Those that all ranks take part in together."""


class BallotOnlyControlPlane:
    """A control plane that accepts ballots but never waits for those of others.

    A checked operation that is issued on it casts its ballot and does not start. So a thread can
    yield between its ballot and the outcome, as one thread that plays several ranks must.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self.question = ""

    @property
    def rank(self) -> int:
        """This rank."""
        return self._control.rank

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._control.size

    def cast(self, question: str, ballot: bytes) -> None:
        """Put the ballot."""
        self.question = question
        self._control.cast(question, ballot)

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        """Not now."""
        raise BallotIncomplete(question, ())

    def decide(self, question: str, value: bytes) -> bytes:
        """Nothing is settled here."""
        return value

    def forget(self, question: str, ranks: Sequence[int] | None = None) -> None:
        """Let go of a question."""
        self._control.forget(question, ranks)

    def set_operation(self, operation: str) -> None:
        """Say what this rank is doing."""
        self._control.set_operation(operation)

    def announce_exit(self, reason: str) -> None:
        """Say that this rank ends."""
        self._control.announce_exit(reason)

    def lost_rank(self, timeout: float) -> RankLost | None:
        """Which rank was lost."""
        return self._control.lost_rank(timeout)

    def close(self) -> None:
        """The plane belongs to the fabric."""


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    """A call of all ranks; a step of one rank after it is what that rank issues instead.

    *resize* is the same call with units of another size.
    """

    def sized(size: int) -> st.SearchStrategy[Program]:
        shapes = st.sampled_from(("2", "3"))
        same = any_collective_step(traits, shapes, OPS)
        rank = st.integers(0, size - 1)
        other = st.builds(lambda step, r: Step(step.op, step.args, r), same, rank)
        resize = st.builds(lambda shape, r: Step("resize", (shape,), r), shapes, rank)
        step_lists = st.lists(same | other | resize, min_size=1, max_size=MAX_STEPS)
        return step_lists.map(lambda steps: make_program(_without_early_deviations(steps), size))

    return programs_by_size(common_sizes(traits), sized)


def _without_early_deviations(steps: list[Step]) -> list[Step]:
    """Without deviations that no common call comes before."""
    first = next((k for k, step in enumerate(steps) if step.rank < 0), len(steps))
    return steps[first:]


def calls_by_round(program: Program) -> list[list[CollectiveCall]]:
    """What each rank issues, round by round."""
    table: list[list[CollectiveCall]] = []
    for step in program.steps:
        if step.op == "resize":
            last = table[-1][step.rank]
            table[-1][step.rank] = replace(last, shape=parse_shape(step.args[0]))
            continue
        key = len(table) - (step.rank >= 0)
        dtype, shape, source = step.args
        call = _as_transported(
            CollectiveCall(step.op, dtype_named(dtype), parse_shape(shape), int(source), key)
        )
        if step.rank < 0:
            table.append([call] * program.size)
        else:
            table[-1][step.rank] = call
    return table


def _as_transported(call: CollectiveCall) -> CollectiveCall:
    """The call; a round's blobs are bytes, whatever they were, and so is what ranks compare."""
    if call.op != "exchange":
        return call
    return replace(call, dtype=torch.uint8, shape=(call.nbytes,))


def is_one_operation(calls: Sequence[CollectiveCall]) -> bool:
    """Whether ranks that issue these issue one operation."""
    return len({(call.op, call.dtype, call.shape, call.source) for call in calls}) == 1


def _play(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    control = control_plane(ctx)
    ballot_only = BallotOnlyControlPlane(control)
    announced = CHECKED(comm, ballot_only, EPOCH, ctx.deadline)
    checked = CHECKED(comm, control, EPOCH, ctx.deadline)
    for calls in calls_by_round(program):
        _cast_ballot(ctx, announced, calls[ctx.rank])
        yield from gather_ballots(ctx, ballot_only.question)
        yield from _play_round(ctx, checked, calls)


def _cast_ballot(ctx: RankContext, announced: Communicator, call: CollectiveCall) -> None:
    try:
        issue_call(announced, call, PlainBuffers(ctx))
    except BallotIncomplete:
        return


def _play_round(ctx: RankContext, checked: Communicator, calls: Sequence[CollectiveCall]) -> Play:
    """Equal operations end well; different ones raise on every rank and name every rank's."""
    call = calls[ctx.rank]
    text = "; ".join(f"rank {rank} issues {other_call}" for rank, other_call in enumerate(calls))
    try:
        issued = issue_call(checked, call, PlainBuffers(ctx))
    except OrderMismatch as error:
        require("C7", not is_one_operation(calls), f"rank {ctx.rank} raised {error}, though {text}")
        for rank, other_call in enumerate(calls):
            is_named = f"rank {rank} issued {other_call.op}" in str(error)
            require(
                "C7",
                is_named,
                f"rank {ctx.rank} does not name {other_call.op} of rank {rank}: {error}",
            )
        return
    require("C7", is_one_operation(calls), f"rank {ctx.rank} raised nothing, though {text}")
    yield from issued.wait(ctx)
    require_results("C7", checked, [issued])


CHECKED_MODE = (
    Property(
        name="checked-ranks-are-told-of-a-mismatch",
        family="control",
        clauses=("C7",),
        claim="Checked ranks that issue different operations all raise, naming every rank's.",
        programs=_programs,
        play=_play,
        needs=offers_any(*OPS),
        scope=PropertyScope.GROUP,
    ),
)
