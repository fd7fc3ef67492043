"""Family *progress*: nothing waits for what it need not, and everything finds its match."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play, Until, demand, finish
from equipoise.hal.conformance.inplace import PROPERTIES as IN_PLACE
from equipoise.hal.conformance.large_collectives import PROGRESS as CROWDS
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.rounds import PROPERTIES as ROUNDS
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.streamed import PROPERTIES as STREAMED
from equipoise.hal.conformance.traffic import (
    RANKS,
    SINGLE,
    Transfer,
    between,
    company,
    fit,
    issue,
    land,
    lone,
    numbers_of,
    operations,
    together,
)

FAMILY = "progress"
MOST = 8
HOSTS = 2
TOLD_APART = ("message", "message", "all_reduce", "broadcast")
"""What shows that two threads' operations were swapped: mostly messages."""
GROUPS = ("first", "second")
"""Two communicators; host k uses the k-th."""


def _ring_programs(traits: Traits) -> st.SearchStrategy[Program]:
    drawn = st.lists(operations(traits, ("message",)), min_size=1, max_size=MOST)
    return st.builds(lambda n, steps: program(lone(fit(steps, n)), n), few(traits), drawn)


def _play_ring(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    transfers: list[Transfer | None] = []
    for end in (0, 1):  # all sends before any receive
        for number, step in enumerate(found.steps):
            if numbers_of(step)[end] == bench.rank:
                transfers.append(issue(bench, group, step, number))
                yield NEXT
    yield from land(bench, transfers, "P1")


def _order_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return between(traits, st.lists(operations(traits, ("message",)), min_size=2, max_size=MOST))


def _play_order(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    transfers = []
    for number, step in enumerate(found.steps):
        transfers.append(issue(bench, group, step, number))
        yield NEXT
    yield from land(bench, transfers, "P2")


def _hosted(traits: Traits, most: int, kinds: Sequence[str]) -> st.SearchStrategy[list[Step]]:
    """Operations, each by one host of every rank."""
    host = st.integers(0, HOSTS - 1)
    one = st.builds(lambda step, host: replace(step, host=host), operations(traits, kinds), host)
    return st.lists(one, min_size=2, max_size=most)


def _groups_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return st.builds(
        lambda n, steps: program(_lone_by_host(fit(steps, n)), n),
        few(traits),
        _hosted(traits, 6, SINGLE),
    )


def _lone_by_host(steps: list[Step]) -> list[Step]:
    """In either communicator at most one message from a rank to another."""
    return [step for host in range(HOSTS) for step in lone(s for s in steps if s.host == host)]


def _independent(traits: Traits) -> str | None:
    return company(traits) or (None if traits.groups.independent_groups else "independent_groups")


def _play_groups(bench: Bench, found: Program) -> Play:
    groups = yield from together(bench, *GROUPS)
    transfers = []
    for number, step in enumerate(found.steps):
        if step.host == bench.host:
            transfers.append(issue(bench, groups[GROUPS[bench.host]], step, number))
            yield NEXT
    yield from land(bench, transfers, "P4")


def _turns_programs(traits: Traits) -> st.SearchStrategy[Program]:
    return between(traits, _hosted(traits, MOST, TOLD_APART))


def _play_turns(bench: Bench, found: Program) -> Play:
    groups = yield from together(bench, "main")
    fresh = [threading.Event() for _ in found.steps]
    issued: list[threading.Event] = bench.shared.setdefault("issued", fresh)
    transfers = []
    for number, step in enumerate(found.steps):
        if step.host != bench.host:
            continue
        if number:
            yield from _turn(bench, issued[number - 1], number)
        transfers.append(issue(bench, groups["main"], step, number))
        issued[number].set()
        yield NEXT
    yield from land(bench, transfers, "P6")


def _turn(bench: Bench, before: threading.Event, number: int) -> Play:
    yield Until(before.is_set, f"the turn of step {number}")
    demand("C8", before.wait(bench.patience), f"the turn of step {number} never came")


def _left_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """`leave(rank)`: ranks that close what they have just opened."""
    leaving = st.lists(RANKS, min_size=1, max_size=MOST, unique=True)

    def made(size: int, gone: Sequence[int]) -> Program:
        ranks = sorted({rank % size for rank in gone})
        return program([Step("leave", (rank,)) for rank in ranks], size)

    return st.builds(made, few(traits), leaving)


def _play_left(bench: Bench, found: Program) -> Play:
    """Any error of an opening, or of the barrier afterwards, is a violation."""
    group = yield from bench.communicator("left early")
    if Step("leave", (bench.rank,)) in found.steps:
        group.close()
    after = yield from bench.communicator("after")
    yield from finish(bench, after.barrier(), "a barrier of the communicator opened afterwards")


PROPERTIES = (
    Property(
        name="sends-need-not-wait-for-receives",
        family=FAMILY,
        clauses=("P1",),
        claim="Everybody sends everything before receiving anything, and all of it arrives.",
        programs=_ring_programs,
        play=_play_ring,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="messages-between-two-ranks-keep-their-order",
        family=FAMILY,
        clauses=("P2",),
        claim="The k-th receive from a rank takes the k-th message that it sent, of any size.",
        programs=_order_programs,
        play=_play_order,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="two-communicators-go-on-without-each-other",
        family=FAMILY,
        clauses=("P4",),
        claim="A host for each communicator: in whatever order they issue, everything ends.",
        programs=_groups_programs,
        play=_play_groups,
        needs=_independent,
        ranks=Ranks.GROUP,
        hosts=HOSTS,
    ),
    Property(
        name="threads-take-turns-on-one-communicator",
        family=FAMILY,
        clauses=("P6",),
        claim="Operations keep the order in which a rank's threads issued them.",
        programs=_turns_programs,
        play=_play_turns,
        needs=company,
        ranks=Ranks.GROUP,
        hosts=HOSTS,
    ),
    Property(
        name="a-rank-may-close-what-it-has-just-opened",
        family=FAMILY,
        clauses=("X8",),
        claim="Ranks that close a communicator as soon as they have it take nobody's opening away.",
        programs=_left_programs,
        play=_play_left,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    *CROWDS,
    *ROUNDS,
    *STREAMED,
    *IN_PLACE,
)
