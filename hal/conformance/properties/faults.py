"""Family *faults*: a rank is killed, stopped, delayed or drops an operation in a random program.

Each program plays on one communicator, and one rank breaks at one of its steps: it is killed, it
stops for good, it pauses for less than the deadline, or it drops one operation. Everything that
depends on it afterwards must fail by the deadline with an error that names operation and purpose;
the control plane must report the lost rank and no other; a communicator that the fault did not
touch must still work; and the survivors must leak nothing.

A step is `(op, (n, a, b))`: `n` elements, and two ranks where the operation needs them. Every rank
computes by itself what it must receive, and which ranks it depends on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator, Exchange, PeerBuffer
from equipoise.hal.conformance.context import (
    Play,
    RankContext,
    Termination,
    Until,
    catch,
    require,
    require_equal,
    wait_for_outcome,
)
from equipoise.hal.conformance.fixtures.strategies import offered, offers
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import DeadlineLength, Property, PropertyScope, Traits
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, Violation
from equipoise.hal.work import Work

REDUCE_OPS = ("all_reduce", "reduce_scatter")
OTHER_OPS = ("all_gather", "all_to_all", "broadcast", "barrier", "message", "exchange")


@dataclass(frozen=True)
class RankOperation:
    """One rank's part in one step.

    Attributes:
        op: the operation of the communicator, which an error has to name.
        issue: calls it.
        required_ranks: ranks without which this part cannot end.
        output: what arrives.
        expected: what must.
    """

    op: str
    issue: Callable[[], Work]
    required_ranks: frozenset[int]
    output: Tensor | None = None
    expected: Tensor | None = None


def operation_steps(traits: Traits, size: int) -> st.SearchStrategy[Step]:
    """Any step that this communicator can do, for that many ranks."""
    summed = REDUCE_OPS if torch.int64 in traits.comm_capabilities.reductions else ()
    ops = offered(traits, (*summed, *OTHER_OPS))
    rank = st.integers(0, size - 1)
    argument_parts = st.tuples(st.integers(1, 64), rank, st.integers(1, size - 1))
    args = argument_parts.map(lambda a: (a[0], a[1], (a[1] + a[2]) % size))
    return st.builds(Step, st.sampled_from(ops), args)


def rank_operations(
    ctx: RankContext, comm: Communicator, step: Step, number: int
) -> list[RankOperation]:
    """This rank's part in step `number`; empty when it has none."""
    count, first, second = (int(argument) for argument in step.args)
    runner = _OperationBuilder(ctx, comm, number, count)
    if step.op == "message":
        return runner.message(first, second)
    if step.op == "broadcast":
        return [runner.broadcast(first)]
    plain: dict[str, Callable[[], RankOperation]] = {
        "all_reduce": runner.all_reduce,
        "reduce_scatter": runner.reduce_scatter,
        "all_gather": runner.all_gather,
        "all_to_all": runner.all_to_all,
        "barrier": runner.barrier,
        "exchange": runner.exchange,
    }
    return [plain[step.op]()]


@dataclass(frozen=True)
class _OperationBuilder:
    """Makes the deeds of one step.

    What a rank gives is a row of bytes that says the rank, the step, and for whom it is.
    """

    ctx: RankContext
    group: Communicator
    number: int
    count: int

    @property
    def _all_ranks(self) -> frozenset[int]:
        return frozenset(range(self.ctx.size))

    def all_reduce(self) -> RankOperation:
        value = self.ctx.copy_of(self._row(self.ctx.rank).long())
        expected = sum((self._row(rank).long() for rank in self._all_ranks), torch.zeros(1).long())
        return RankOperation(
            "all_reduce", lambda: self.group.all_reduce(value), self._all_ranks, value, expected
        )

    def reduce_scatter(self) -> RankOperation:
        mine = self.ctx.copy_of(self._rows(lambda other: (self.ctx.rank, other)).long())
        out = self.ctx.full((self.count,), 0, torch.int64)
        expected = self._rows(lambda other: (other, self.ctx.rank)).long().sum(0)
        issue = lambda: self.group.reduce_scatter(out, mine)  # noqa: E731
        return RankOperation("reduce_scatter", issue, self._all_ranks, out, expected)

    def all_gather(self) -> RankOperation:
        mine = self.ctx.copy_of(self._row(self.ctx.rank))
        out = self.ctx.full((self.ctx.size, self.count), 0)
        expected = self._rows(lambda other: (other, 0))
        return RankOperation(
            "all_gather", lambda: self.group.all_gather(out, mine), self._all_ranks, out, expected
        )

    def all_to_all(self) -> RankOperation:
        mine = self.ctx.copy_of(self._rows(lambda other: (self.ctx.rank, other)))
        out = self.ctx.full((self.ctx.size, self.count), 0)
        expected = self._rows(lambda other: (other, self.ctx.rank))
        return RankOperation(
            "all_to_all", lambda: self.group.all_to_all(out, mine), self._all_ranks, out, expected
        )

    def broadcast(self, source: int) -> RankOperation:
        value = self.ctx.copy_of(self._row(self.ctx.rank))
        issue = lambda: self.group.broadcast(value, source)  # noqa: E731
        return RankOperation("broadcast", issue, frozenset({source}), value, self._row(source))

    def barrier(self) -> RankOperation:
        return RankOperation("barrier", self.group.barrier, self._all_ranks)

    def message(self, source: int, destination: int) -> list[RankOperation]:
        if self.ctx.rank == source:
            operand = self.ctx.copy_of(self._row(source))
            send = lambda: self.group.isend(operand, destination)  # noqa: E731
            # A send is a rendezvous: it ends at the earliest when its receive is posted.
            return [RankOperation("isend", send, frozenset({destination}))]
        if self.ctx.rank == destination:
            out = self.ctx.full((self.count,), 0)
            receive = lambda: self.group.irecv(out, source)  # noqa: E731
            return [RankOperation("irecv", receive, frozenset({source}), out, self._row(source))]
        return []

    def exchange(self) -> RankOperation:
        """A blob to the next rank, one from the rank before."""
        size, rank = self.ctx.size, self.ctx.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        operand, out = self.ctx.copy_of(self._row(rank)), self.ctx.full((self.count,), 0)
        buffers = Exchange((PeerBuffer(after, operand),), (PeerBuffer(before, out),))
        issue = lambda: self.group.exchange(buffers)  # noqa: E731
        return RankOperation("exchange", issue, frozenset({after, before}), out, self._row(before))

    def _row(self, sender: int, receiver: int = 0) -> Tensor:
        """uint8 [count]."""
        start = 1 + 31 * sender + 7 * receiver + 3 * self.number
        return (torch.arange(self.count) + start).to(torch.uint8)

    def _rows(self, ends: Callable[[int], tuple[int, int]]) -> Tensor:
        """uint8 [size, count]: for each rank the row between these two ends."""
        return torch.stack([self._row(*ends(other)) for other in range(self.ctx.size)])


MAX_STEPS = 6
MAX_RANKS = 5


class RankFault(StrEnum):
    """What happens to one rank."""

    KILL = "kill"
    """It ends at once."""
    STOP = "stop"
    """Nothing of it moves any more."""
    DELAY = "delay"
    """Nothing of it moves for less than the deadline."""
    DROP = "drop"
    """It leaves out one operation."""


RANK_ENDING_FAULTS = (RankFault.KILL, RankFault.STOP)


@dataclass(frozen=True)
class FaultPlan:
    """What is going to happen, known to every rank.

    Attributes:
        fault: what happens.
        victim: to whom.
        step: before which step it is killed, stopped or delayed, or which step it drops. A dropped
            step is the last one: a later one would take its place, since there are no tags (P2).
        window: how many operations a rank has in flight before it waits for the oldest.
        steps: what the ranks do.
    """

    fault: RankFault
    victim: int
    step: int
    window: int
    steps: tuple[Step, ...]

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that the fault ends."""
        return frozenset({self.victim} if self.fault in RANK_ENDING_FAULTS else ())

    def never_comes(self, number: int) -> bool:
        """Whether the victim's part in step `number` never comes."""
        if self.fault is RankFault.DROP:
            return number == self.step
        return self.fault in RANK_ENDING_FAULTS and number >= self.step

    def may_fail(self, number: int) -> bool:
        """Whether step `number` may fail: a rank that is lost takes with it what is in flight."""
        return self.fault in RANK_ENDING_FAULTS or self.never_comes(number)


def fault_plan(program: Program) -> FaultPlan:
    """The fault plan of a program's settings."""
    fault, at = (
        RankFault(str(program.setting("fault"))),
        program.int_setting("at") % len(program.steps),
    )
    steps = program.steps[: at + 1] if fault is RankFault.DROP else program.steps
    return FaultPlan(fault, program.int_setting("victim"), at, program.int_setting("window"), steps)


def fault_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Any operations on any number of ranks, and any fault that the executor can bring about."""
    sizes = [size for size in traits.group_sizes if 2 <= size <= MAX_RANKS]
    faults = [
        fault.value
        for fault in RankFault
        if traits.can_end_ranks or fault not in RANK_ENDING_FAULTS
    ]

    def of(size: int) -> st.SearchStrategy[Program]:
        settings = st.fixed_dictionaries(
            {
                "fault": st.sampled_from(faults),
                "victim": st.integers(0, size - 1),
                "at": st.integers(0, MAX_STEPS - 1),
                "window": st.sampled_from([0, 1, MAX_STEPS]),
            }
        )
        step_lists = st.lists(operation_steps(traits, size), min_size=1, max_size=MAX_STEPS)
        return st.builds(lambda steps, how: make_program(steps, size, how), step_lists, settings)

    return st.sampled_from(sizes).flatmap(of)


@dataclass(frozen=True)
class _PendingOperation:
    """A deed in flight, or refused."""

    number: int
    operation: RankOperation
    work: Work | None
    refusal: Exception | None


@dataclass
class _FaultRunner:
    """One rank that plays a fault plan."""

    ctx: RankContext
    plan: FaultPlan
    control: ControlPlane
    communicator: Communicator
    current_operation: str = "start"

    def run(self) -> Play:
        """All steps; waits for each operation, at the latest at the end."""
        pending: list[_PendingOperation] = []
        for number, step in enumerate(self.plan.steps):
            if self.ctx.rank == self.plan.victim and number == self.plan.step:
                yield from self._inject_fault()
                if self.plan.fault is RankFault.DROP:
                    continue
            for deed in rank_operations(self.ctx, self.communicator, step, number):
                pending.append(self._issue(number, deed))
            while len(pending) > self.plan.window:
                yield from self._check_end(pending.pop(0))
        for operation in pending:
            yield from self._check_end(operation)

    def _inject_fault(self) -> Play:
        if self.plan.fault is RankFault.DELAY:
            yield from self.ctx.pause()
        elif self.plan.fault in RANK_ENDING_FAULTS:
            yield from self.ctx.end_rank(Termination(self.plan.fault))

    def _issue(self, number: int, operation: RankOperation) -> _PendingOperation:
        self.current_operation = f"step {number}, {operation.op}"
        self.control.set_operation(self.current_operation)
        begun: list[Work] = []
        refusal = catch(lambda: begun.append(operation.issue()), CommunicatorFailed)
        return _PendingOperation(number, operation, begun[0] if begun else None, refusal)

    def _check_end(self, pending: _PendingOperation) -> Play:
        """Compare how it ended with what the fault plan allows."""
        number, operation, error = pending.number, pending.operation, pending.refusal
        what = f"step {number}, {operation.op}"
        if pending.work is not None:
            error = yield from wait_for_outcome(self.ctx, pending.work, what)
        if error is not None:
            self._require_error_is_due(number, operation, error)
            return
        missed = self.plan.victim in operation.required_ranks and self.plan.never_comes(number)
        mine = self.ctx.rank == self.plan.victim
        require("E1", mine or not missed, f"{what} ended well without rank {self.plan.victim}")
        if operation.output is not None and operation.expected is not None:
            require_equal("E1", operation.output, operation.expected, what)

    def _require_error_is_due(
        self, number: int, operation: RankOperation, error: Exception
    ) -> None:
        """The error must be expected, and must name operation and purpose."""
        text = f"{type(error).__name__}: {error}"
        expected = any(self.plan.may_fail(earlier) for earlier in range(number + 1))
        require("E1", expected, f"step {number}, {operation.op} was not to fail: {text}")
        require("E1", isinstance(error, CommunicatorFailed), f"{operation.op} raised {text}")
        is_named = operation.op in str(error) and self.communicator.purpose in str(error)
        require(
            "E1", is_named, f"{operation.op} of {self.communicator.purpose!r} is not named: {text}"
        )

    def check_reported_loss(self) -> Play:
        """The lost rank, from the control plane (clause C5)."""
        if not self.plan.lost:
            loss = self.control.lost_rank(0.0)
            require("C5", loss is None, f"nobody was lost, yet: {loss}")
            return
        yield Until(lambda: self.control.lost_rank(0.0) is not None, "word of the lost rank")
        loss = self.control.lost_rank(self.ctx.timeout)
        if loss is None:
            raise Violation("C5", f"nobody says that rank {self.plan.victim} was lost")
        require("C5", loss.rank == self.plan.victim, f"not rank {self.plan.victim}: {loss}")
        require(
            "C5",
            self.current_operation in str(loss),
            f"{self.current_operation!r} is not named: {loss}",
        )


def _barrier_of(
    ctx: RankContext, control: ControlPlane, question: str, ranks: Sequence[int]
) -> Play:
    """Wait for these ranks, this one among them, by the control plane alone."""
    control.cast(question, b"")

    def all_present() -> bool:
        missing = catch(lambda: control.collect(question, 0.0, ranks), BallotIncomplete)
        return missing is None

    yield Until(all_present, f"the others at {question!r}")
    control.collect(question, ctx.timeout, ranks)


def _require_spared_works(ctx: RankContext, spared: Communicator) -> Play:
    """What the fault has not touched still works (clause X3)."""
    value = ctx.copy_of(torch.tensor([1 << spared.rank]))
    begun: list[Work] = []
    error = catch(lambda: begun.append(spared.all_reduce(value)), CommunicatorFailed)
    if begun:
        error = yield from wait_for_outcome(ctx, begun[0], "a sum of the spared")
    require("X3", error is None, f"another communicator failed too: {error}")
    require_equal("X3", value, torch.tensor([(1 << spared.size) - 1]), "a sum of the spared")


def _play(ctx: RankContext, program: Program) -> Play:
    """One communicator has the fault, the other continues without the lost rank."""
    assert ctx.fabric is not None
    plan, control = fault_plan(program), ctx.fabric.control
    hit = yield from ctx.communicator("hit")
    survivors = [rank for rank in range(ctx.size) if rank not in plan.lost]
    spared = hit if ctx.rank in plan.lost else (yield from ctx.communicator("spared", survivors))
    # The fault strikes only after every rank has opened: opening is not tested here.
    yield from _barrier_of(ctx, control, "begin", range(ctx.size))
    survivor = _FaultRunner(ctx, plan, control, hit)
    yield from survivor.run()
    yield from survivor.check_reported_loss()
    # What follows has a deadline of its own, which must not run while others wait for theirs.
    yield from _barrier_of(ctx, control, "end", survivors)
    yield from _require_spared_works(ctx, spared)


def _several_ranks(traits: Traits) -> str | None:
    return None if max(traits.group_sizes) > 1 else "several ranks"


def _spared_sum(traits: Traits) -> str | None:
    """Requires the sum that shows that another communicator still works."""
    return _several_ranks(traits) or offers("all_reduce")(traits)


FAULTS = Property(
    name="a-fault-ends-what-depends-on-it-and-nothing-else",
    family="faults",
    clauses=("E1", "C5", "C8", "X3", "R1"),
    claim="A rank that is killed, stopped, late or misses an operation ends only what needs it.",
    programs=fault_programs,
    play=_play,
    needs=_spared_sum,
    scope=PropertyScope.GROUP,
    deadline=DeadlineLength.SHORT,
    lost_ranks=lambda program: fault_plan(program).lost,
)
PROPERTIES = (FAULTS,)
