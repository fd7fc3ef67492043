"""Part of family *progress*: rounds of blobs, and links that are built ahead of them."""

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import few
from equipoise.hal.conformance.traffic import (
    RANKS,
    between,
    company,
    fit,
    issue,
    land,
    lone,
    numbers_of,
    operations,
    triples,
)

FAMILY = "progress"
MOST = 4


def _round_programs(traits: Traits) -> st.SearchStrategy[Program]:
    empty = st.lists(st.booleans(), min_size=MOST, max_size=MOST)
    step = st.builds(_with_empty, operations(traits, ("exchange",)), empty)
    return between(traits, st.lists(step, min_size=1, max_size=MOST))


def _with_empty(step: Step, empty: list[bool]) -> Step:
    """The round with some of its blobs of no bytes."""
    blobs = triples(numbers_of(step))
    sized = [(s, t, 0 if empty[place % MOST] else n) for place, (s, t, n) in enumerate(blobs)]
    return Step(step.op, tuple(number for blob in sized for number in blob))


def _play_rounds(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    for number, step in enumerate(found.steps):
        yield from land(bench, [issue(bench, group, step, number)], "X1")


def _warm_programs(traits: Traits) -> st.SearchStrategy[Program]:
    links = st.lists(st.tuples(RANKS, RANKS, st.just(0)), max_size=6)
    messages = st.lists(operations(traits, ("message",)), min_size=1, max_size=MOST)

    def made(size: int, pairs: list[tuple[int, int, int]], steps: list[Step]) -> Program:
        warm = [Step("message", pair) for pair in pairs]
        flat = [n for step in fit(warm, size) for n in numbers_of(step)[:2]]
        return program([Step("warm", tuple(flat)), *lone(fit(steps, size))], size)

    return st.builds(made, few(traits), links, messages)


def _play_warm(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    ends = numbers_of(found.steps[0])
    yield NEXT
    group.warm(tuple(zip(ends[::2], ends[1::2], strict=True)))
    transfers = []
    for number, step in enumerate(found.steps[1:]):
        transfers.append(issue(bench, group, step, number))
        yield NEXT
    yield from land(bench, transfers, "X2")


PROPERTIES = (
    Property(
        name="a-round-brings-every-blob-whole",
        family=FAMILY,
        clauses=("X1",),
        claim="One blob a pair, of any size, empty ones among them; rounds follow each other.",
        programs=_round_programs,
        play=_play_rounds,
        needs=company,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="links-warmed-in-one-order-carry-traffic",
        family=FAMILY,
        clauses=("X2",),
        claim="After all ranks have warmed the same links, in one order, messages arrive.",
        programs=_warm_programs,
        play=_play_warm,
        needs=company,
        ranks=Ranks.GROUP,
    ),
)
