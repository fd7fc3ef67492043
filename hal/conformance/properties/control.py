"""Family *control*: ballots, decisions, lost ranks, forgotten questions, a lost store."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st

from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    Termination,
    Until,
    catch,
    control_barrier,
    control_plane,
    gather_ballots,
    require,
    wait_for_success,
)
from equipoise.hal.conformance.fixtures.collectives import parse_shape, shape_text
from equipoise.hal.conformance.fixtures.comm_operations import several_ranks
from equipoise.hal.conformance.fixtures.strategies import common_sizes, offers, programs_by_size
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties.control_checked_mode import CHECKED_MODE
from equipoise.hal.conformance.property import DeadlineLength, Property, PropertyScope, Traits
from equipoise.hal.errors import (
    BallotIncomplete,
    ControlError,
    ControlPlaneLost,
    EquipoiseError,
    RankLost,
    Violation,
)

STORE_CALLS: dict[str, Callable[[RankContext, str], object]] = {
    "cast": lambda ctx, question: control_plane(ctx).cast(question, b"a"),
    "look": lambda ctx, question: control_plane(ctx).collect(question, 0.0),
    "wait": lambda ctx, question: control_plane(ctx).collect(question, ctx.timeout),
    "decide": lambda ctx, question: control_plane(ctx).decide(question, b"a"),
    "forget": lambda ctx, question: control_plane(ctx).forget(question),
}
"""Calls that cannot succeed without the store."""
OTHERS = ("lost", "leave")
"""Calls that succeed without the store."""
MAX_STEPS = 6


def _lost_store_programs(traits: Traits) -> st.SearchStrategy[Program]:
    def sized(size: int) -> st.SearchStrategy[Program]:
        rank, how = st.integers(0, size - 1), st.sampled_from([end.value for end in Termination])
        step = st.builds(
            lambda r, op: Step(op, (), r), rank, st.sampled_from([*STORE_CALLS, *OTHERS])
        )
        step_lists = st.lists(step, min_size=1, max_size=MAX_STEPS)
        return st.builds(
            lambda steps, end: make_program(steps, size, {"store": end}), step_lists, how
        )

    return programs_by_size(common_sizes(traits), sized)


def _play_lost_store(ctx: RankContext, program: Program) -> Play:
    """Every rank ends the store, so that no rank has to learn that another one did."""
    ctx.environment.lose_store(Termination(str(program.setting("store"))))
    for number, step in enumerate(program.steps_of(ctx.rank)):
        yield NEXT
        if step.op == "lost":
            _require_no_loss(ctx)
        elif step.op == "leave":
            control_plane(ctx).announce_exit("without a store")
        else:
            _require_control_lost(ctx, step.op, f"question {number}")


def _require_control_lost(ctx: RankContext, op: str, question: str) -> None:
    results: list[object] = []
    error = catch(lambda: results.append(STORE_CALLS[op](ctx, question)), ControlError)
    outcome = repr(error) if error is not None else f"{results}"
    what = f"rank {ctx.rank}: {op} without a store ended with {outcome}, not with ControlPlaneLost"
    require("C6", isinstance(error, ControlPlaneLost), what)


def _require_no_loss(ctx: RankContext) -> None:
    losses = []
    catch(lambda: losses.append(control_plane(ctx).lost_rank(0.0)), ControlPlaneLost)
    require("C5", losses in ([], [None]), f"rank {ctx.rank} is told {losses}; the store is lost")


LOST_STORE = Property(
    name="a-lost-store-raises-control-lost",
    family="control",
    clauses=("C6", "C5", "R1"),
    claim="Once the store is gone or silent every question ends with ControlPlaneLost, in time.",
    programs=_lost_store_programs,
    play=_play_lost_store,
    applies_to=lambda traits: traits.can_end_ranks,
    scope=PropertyScope.GROUP,
    deadline=DeadlineLength.SHORT,
    lost_ranks=lambda _: frozenset(),
    ends_store=True,
)


CLAUSE = "C9"
NAMES = ("q", "q/0", "q/0/1")
"""Each is a prefix of the next, as keys in a store may be."""
FIRST, ANEW = b"first", b"anew"


def _forget_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Which rank forgets which question; several ranks may, repeatedly."""

    def sized(size: int) -> st.SearchStrategy[Program]:
        rank, name = st.integers(0, size - 1), st.sampled_from(NAMES)
        forget = st.builds(lambda r, q: Step("forget", (q,), r), rank, name)
        step_lists = st.lists(forget, min_size=1, max_size=MAX_STEPS)
        return step_lists.map(lambda steps: make_program(steps, size))

    return programs_by_size(common_sizes(traits), sized)


def _play_forgetting(ctx: RankContext, program: Program) -> Play:
    """All cast ballots, some forget, all read; then forgotten questions are asked once more."""
    control, prefix = control_plane(ctx), (yield from ctx.communicator()).purpose
    forgotten_names = {str(step.args[0]) for step in program.steps}
    for name in NAMES:
        control.cast(f"{prefix}/{name}", FIRST)
        control.decide(f"{prefix}/{name}", FIRST)
    yield from control_barrier(ctx, f"{prefix}: all have said")
    for step in program.steps_of(ctx.rank):
        _forget(ctx, f"{prefix}/{step.args[0]}")
        yield NEXT
    yield from control_barrier(ctx, f"{prefix}: all have forgotten")
    for name in NAMES:
        _check_ballots(ctx, f"{prefix}/{name}", name in forgotten_names)
    yield from control_barrier(ctx, f"{prefix}: all have looked")
    yield from _ask_again(ctx, prefix, forgotten_names)


def _forget(ctx: RankContext, question: str) -> None:
    error = catch(lambda: control_plane(ctx).forget(question), EquipoiseError, KeyError)
    require(CLAUSE, error is None, f"rank {ctx.rank} cannot forget {question}: {error!r}")


def _check_ballots(ctx: RankContext, question: str, is_forgotten: bool) -> None:
    """No ballot is there, or every one is."""
    subject = f"rank {ctx.rank}, {question}, {'forgotten' if is_forgotten else 'not forgotten'}"
    all_ranks = set(range(ctx.size))
    try:
        ballots = control_plane(ctx).collect(question, 0.0)
    except BallotIncomplete as error:
        missing = set(error.missing)
        require(
            CLAUSE,
            missing == (all_ranks if is_forgotten else set()),
            f"{subject}: {missing} are missing",
        )
        return
    require(CLAUSE, not is_forgotten and set(ballots) == {FIRST}, f"{subject}: reads {ballots}")


def _ask_again(ctx: RankContext, prefix: str, forgotten_names: set[str]) -> Play:
    """Of what is forgotten the name is free; what is not was settled before."""
    control = control_plane(ctx)
    for name in NAMES:
        question, expected = f"{prefix}/{name}", ANEW if name in forgotten_names else FIRST
        subject = f"rank {ctx.rank}, {question}"
        outcome = control.decide(question, ANEW)
        require(
            CLAUSE,
            outcome == expected,
            f"{subject}: is told {outcome!r} where {expected!r} was due",
        )
        error = catch(partial(control.cast, question, expected), EquipoiseError)
        require(CLAUSE, error is None, f"{subject}: cannot cast {expected!r}: {error!r}")
        ballots = yield from gather_ballots(ctx, question)
        require(
            CLAUSE, set(ballots) == {expected}, f"{subject}: reads {ballots}, {expected!r} was cast"
        )


FORGETTING = Property(
    name="a-forgotten-question-leaves-nothing-behind",
    family="control",
    clauses=(CLAUSE,),
    claim="Whoever forgets a question, it is gone for all, its name is free, and others stay.",
    programs=_forget_programs,
    play=_play_forgetting,
    scope=PropertyScope.GROUP,
)


FAMILY = "control"
QUESTIONS = 2
LONG = "long"
LONG_BALLOT = bytes(range(1, 251)) * 280
"""A ballot of 70,000 bytes: a plan of many layers is as long."""
VALUES = ("a", "b", "", "\0c", LONG)
MAX_BALLOT_STEPS = 10
LATE = "late"
REASON = "has done its part"


def _ballots(traits: Traits) -> st.SearchStrategy[Program]:
    def sized(size: int) -> st.SearchStrategy[Program]:
        rank, question = st.integers(0, size - 1), st.integers(0, QUESTIONS - 1)
        value = st.sampled_from(VALUES)
        some = st.lists(rank, min_size=1, max_size=size, unique=True).map(shape_text)
        cast = st.builds(lambda r, q, v: Step("cast", (q, v), r), rank, question, value)
        look = st.builds(lambda r, q, m: Step("collect", (q, m), r), rank, question, some)
        step_lists = st.lists(cast | look, min_size=1, max_size=MAX_BALLOT_STEPS)
        return step_lists.map(lambda steps: make_program(_without_repeated_ballots(steps), size))

    return programs_by_size(common_sizes(traits), sized)


def _without_repeated_ballots(steps: Sequence[Step]) -> list[Step]:
    """Without ballots that repeat the first one: whether those are errors is left open."""
    first: dict[tuple[int, object], Step] = {}
    distinct_steps = []
    for step in steps:
        if step.op == "cast":
            before = first.setdefault((step.rank, step.args[0]), step)
            if before is not step and before.args == step.args:
                continue
        distinct_steps.append(step)
    return distinct_steps


def _first_ballots(program: Program) -> dict[tuple[int, int], str]:
    """By question and rank: what counts."""
    first: dict[tuple[int, int], str] = {}
    for step in program.steps:
        if step.op == "cast":
            first.setdefault((int(step.args[0]), step.rank), str(step.args[1]))
    return first


def _encode(value: str) -> bytes:
    """The ballot that a program calls so."""
    return LONG_BALLOT if value == LONG else value.encode()


def _decode(ballot: bytes) -> str:
    """What a program calls the ballot; a part of the long one is none."""
    if ballot == LONG_BALLOT:
        return LONG
    return ballot.decode() if len(ballot) < len(LONG_BALLOT) // 1000 else f"{len(ballot)} bytes"


def _play_ballots(ctx: RankContext, program: Program) -> Play:
    prefix = (yield from ctx.communicator()).purpose
    first = _first_ballots(program)
    cast_questions: set[int] = set()
    for step in program.steps_of(ctx.rank):
        if step.op == "cast":
            _cast(ctx, prefix, int(step.args[0]), str(step.args[1]), cast_questions)
            yield NEXT
    yield from control_barrier(ctx, f"{prefix}/all have cast")
    for step in program.steps_of(ctx.rank):
        if step.op == "collect":
            _collect(ctx, prefix, int(step.args[0]), parse_shape(step.args[1]), first)
    for question in range(QUESTIONS):
        _collect(ctx, prefix, question, None, first)


def _cast(
    ctx: RankContext, prefix: str, question: int, value: str, cast_questions: set[int]
) -> None:
    control, name = control_plane(ctx), f"{prefix}/{question}"
    if question not in cast_questions:
        cast_questions.add(question)
        control.cast(name, _encode(value))
        return
    error = catch(lambda: control.cast(name, _encode(value)), ControlError)
    what = f"rank {ctx.rank} cast {value!r} on {question} after another ballot"
    require("C1", error, f"{what}: no error")


def _collect(
    ctx: RankContext,
    prefix: str,
    question: int,
    ranks: Sequence[int] | None,
    first: dict[tuple[int, int], str],
) -> None:
    """All these ballots, or exactly those ranks that did not cast any."""
    members = range(ctx.size) if ranks is None else ranks
    expected = [first.get((question, rank)) for rank in members]
    absent = {rank for rank, ballot in zip(members, expected, strict=True) if ballot is None}
    subject = f"rank {ctx.rank}, ballots of ranks {list(members)} on {question}"
    try:
        ballots = control_plane(ctx).collect(f"{prefix}/{question}", 0.0, ranks)
    except BallotIncomplete as error:
        missing = set(error.missing)
        require(
            "C4", missing == absent, f"{subject}: named {missing or 'nobody'}, {absent} are missing"
        )
        return
    require("C4", not absent, f"{subject}: got {len(ballots)}, though {absent} are missing")
    texts = [_decode(ballot) for ballot in ballots]
    require("C1", texts == expected, f"{subject}: {texts}, first cast were {expected}")


def _decisions(traits: Traits) -> st.SearchStrategy[Program]:
    def sized(size: int) -> st.SearchStrategy[Program]:
        step = st.builds(
            lambda r, q, v: Step("decide", (q, v), r),
            st.integers(0, size - 1),
            st.integers(0, QUESTIONS - 1),
            st.sampled_from(VALUES),
        )
        step_lists = st.lists(step, min_size=1, max_size=MAX_BALLOT_STEPS)
        return step_lists.map(lambda steps: make_program(steps, size))

    return programs_by_size(common_sizes(traits), sized)


def _play_decisions(ctx: RankContext, program: Program) -> Play:
    """Each rank proposes its own values; then all ask again, with a value that no rank proposed."""
    prefix = (yield from ctx.communicator()).purpose
    control = control_plane(ctx)
    learned = []
    for step in program.steps_of(ctx.rank):
        question, value = step.args
        outcome = control.decide(f"{prefix}/{question}", _encode(str(value)))
        learned.append([question, _decode(outcome)])
        yield NEXT
    yield from control_barrier(ctx, f"{prefix}/all have proposed")
    for question in sorted({int(step.args[0]) for step in program.steps}):
        outcome = control.decide(f"{prefix}/{question}", LATE.encode())
        learned.append([question, _decode(outcome)])
    return learned


def _judge_decisions(program: Program, answers: Sequence[Any]) -> None:
    """One outcome a question, and one that was proposed."""
    for question in range(QUESTIONS):
        proposed = {str(s.args[1]) for s in program.steps if s.args[0] == question}
        learned = {
            outcome: f"rank {rank}"
            for rank, answer in enumerate(answers)
            for asked_question, outcome in answer
            if asked_question == question
        }
        require("C2", len(learned) < 2, f"question {question}: outcomes differ, {learned}")
        require("C2", learned.keys() <= proposed, f"question {question}: {learned}, not {proposed}")


def _heartbeat_programs(traits: Traits) -> st.SearchStrategy[Program]:
    def sized(size: int) -> st.SearchStrategy[Program]:
        rank = st.integers(0, size - 1)
        enter = st.builds(lambda r: Step("enter", ("a step",), r), rank)
        ask = st.builds(lambda r: Step("lost", (), r), rank)
        step_lists = st.lists(
            ask | enter | st.just(Step("barrier")), min_size=1, max_size=MAX_BALLOT_STEPS
        )
        return step_lists.map(lambda steps: make_program(steps, size))

    return programs_by_size(common_sizes(traits), sized)


def _play_heartbeats(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    control = control_plane(ctx)
    for step in program.steps_of(ctx.rank):
        yield NEXT
        if step.op == "barrier":
            yield from wait_for_success(ctx, comm.barrier(), "a barrier")
        elif step.op == "enter":
            control.set_operation(str(step.args[0]))
        else:
            reported_loss = control.lost_rank(0.0)
            require(
                "C5",
                reported_loss is None,
                f"rank {ctx.rank} was told {reported_loss}; all ranks beat",
            )


def _leaving(traits: Traits) -> st.SearchStrategy[Program]:
    """One rank casts and proposes like the others, then leaves, or is killed where one may be."""
    sizes = [size for size in common_sizes(traits) if size > 1]
    ways = ("leave", "kill") if traits.can_end_ranks else ("leave",)

    def sized(size: int) -> st.SearchStrategy[Program]:
        leaver, how = st.integers(0, size - 1), st.sampled_from(ways)
        return st.builds(lambda rank, op: make_program([Step(op, (), rank)], size), leaver, how)

    return programs_by_size(sizes, sized)


def _killed_ranks(program: Program) -> frozenset[int]:
    return frozenset(step.rank for step in program.steps if step.op == "kill")


def _play_leaving(ctx: RankContext, program: Program) -> Play:
    control, (step,) = control_plane(ctx), program.steps
    leaver = step.rank
    control.cast("word", f"of {ctx.rank}".encode())
    control.set_operation(f"operation {ctx.rank}")
    if ctx.rank == leaver:
        control.decide("outcome", b"the leaver's")
    yield from control_barrier(ctx, "all have cast")
    remaining_ranks = [rank for rank in range(ctx.size) if rank != leaver]
    if ctx.rank == leaver:
        yield from gather_ballots(ctx, "all have met", remaining_ranks)
        if step.op == "kill":
            yield from ctx.end_rank(Termination.KILL)
        control.announce_exit(REASON)
        return
    control.cast("all have met", b"here")
    yield Until(lambda: control.lost_rank(0.0) is not None, f"word that rank {leaver} is gone")
    _require_reported_loss(ctx, step, control.lost_rank(ctx.timeout))
    _read_back(ctx, leaver)


def _read_back(ctx: RankContext, leaver: int) -> None:
    """Everybody's ballots, and the outcome that the leaver proposed."""
    control, subject = control_plane(ctx), f"rank {ctx.rank}, after rank {leaver} is gone"
    expected = tuple(f"of {rank}".encode() for rank in range(ctx.size))
    try:
        words = control.collect("word", 0.0)
    except BallotIncomplete as error:
        raise Violation("C3", f"{subject}: {error}") from error
    require("C3", words == expected, f"{subject}: reads {words}")
    outcome = control.decide("outcome", b"another")
    require("C3", outcome == b"the leaver's", f"{subject}: is told outcome {outcome!r}")


def _require_reported_loss(ctx: RankContext, step: Step, loss: RankLost | None) -> None:
    """Which rank, how, and what this one was doing."""
    subject = f"rank {ctx.rank}"
    if loss is None:
        raise Violation("C5", f"{subject} is not told that rank {step.rank} is gone")
    require("C5", loss.rank == step.rank, f"{subject} is told {loss}; rank {step.rank} is gone")
    has_reason = step.op == "kill" or REASON in loss.reason
    require(
        "C5", has_reason, f"{subject} is told that rank {loss.rank} {loss.reason!r}, not {REASON!r}"
    )
    doing = f"operation {ctx.rank}"
    require(
        "C5", loss.operation == doing, f"{subject} was in {doing}, the loss says {loss.operation}"
    )


PROPERTIES = (
    Property(
        name="ballots-stay-and-the-missing-are-named",
        family=FAMILY,
        clauses=("C1", "C4"),
        claim="The first ballot counts, another one is an error, and the missing are named.",
        programs=_ballots,
        play=_play_ballots,
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="one-decision-for-all",
        family=FAMILY,
        clauses=("C2",),
        claim="Whoever asks, whenever, learns one and the same proposed outcome.",
        programs=_decisions,
        play=_play_decisions,
        judge=_judge_decisions,
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="a-rank-with-a-heartbeat-is-not-reported-lost",
        family=FAMILY,
        clauses=("C5",),
        claim="While every rank beats, none is reported lost, whatever it does or waits for.",
        programs=_heartbeat_programs,
        play=_play_heartbeats,
        needs=offers("barrier"),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="ballots-outlive-the-rank-that-cast-them",
        family=FAMILY,
        clauses=("C3", "C5", "R1"),
        claim="A rank that leaves or dies is named with the operation; what it said stays.",
        programs=_leaving,
        play=_play_leaving,
        needs=several_ranks,
        scope=PropertyScope.GROUP,
        lost_ranks=_killed_ranks,
    ),
    FORGETTING,
    LOST_STORE,
    *CHECKED_MODE,
)
