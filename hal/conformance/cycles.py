"""Property of family *resources* about what is given back: after every use, everything."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand
from equipoise.hal.conformance.devices import demand_no_more
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import ROLES, plain
from equipoise.hal.stream import Role

CYCLES = 3
"""How often a program is repeated: the first time may leave what is kept once for all."""
WIDTH = 8
"""Bytes of a slot, and of a page."""
Made = Iterator[object]
"""What was made, for somebody to see whether it is still there."""


def _events(bench: Bench) -> Made:
    first, second = (bench.accelerator.stream(Role(role)) for role in ROLES[:2])
    event = bench.accelerator.event()
    first.record(event)
    second.wait(event)
    yield event


def _slots(bench: Bench) -> Made:
    place = plain(bench, 1, 1, WIDTH)
    reader = place.store.attach(bench.accelerator.stream(Role(ROLES[0])))
    lease = place.store.lease([0])
    lease.release()
    place.unpack([0], 1, ROLES[1])
    place.store.commit([(0, 0)], place.stream(ROLES[2]))
    blob = place.look([0], ROLES[0])
    reader.detach()
    yield from (place.store, reader, lease, blob, place.pack([0], ROLES[1]))


def _pages(bench: Bench) -> Made:
    pool = bench.accelerator.host_pool(WIDTH, 1)
    page = pool.take(bench.patience)
    page.give_back(None)
    yield from (pool, page)


def _lock(bench: Bench) -> Made:
    lock, stream = bench.accelerator.stream_lock(bench.deadline), ROLES[0]
    lock.signal(lock.epoch)
    lock.acquire(bench.accelerator.stream(Role(stream)))
    lock.release(bench.accelerator.stream(Role(stream)))
    lock.wait(lock.epoch, bench.patience)
    yield lock


def _graph(bench: Bench) -> Made:
    graph, stream = bench.accelerator.graph(), bench.accelerator.stream(Role(ROLES[0]))
    cell = bench.filled((1,), 0)
    graph.capture(stream, lambda: stream.launch(lambda: cell.fill_(1)))
    graph.replay(stream)
    yield from (graph, cell)


USES: Mapping[str, Callable[[Bench], Made]] = {
    "events": _events,
    "slots": _slots,
    "pages": _pages,
    "stream_lock": _lock,
    "graph_capture": _graph,
}
"""One use of each kind of thing; a capability has the name of its use."""


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    declared = [use for use in USES if getattr(traits.accelerator, use, True)]
    steps = st.lists(st.sampled_from(declared).map(Step), min_size=1, max_size=4)
    return steps.map(program)


def _play(bench: Bench, found: Program) -> Play:
    """What the last cycle made may still be at hand; what came before it may not."""
    cycles: list[list[tuple[str, weakref.ref[object]]]] = []
    bases: list[Mapping[str, int]] = []
    for _ in range(CYCLES):
        cycles.append([born for step in found.steps for born in _use(bench, step.op)])
        bench.drain()
        yield NEXT
        gc.collect(1)
        bases.append(bench.surroundings.leftovers())
    remembered = [name for cycle in cycles[:-1] for name, made in cycle if _lives(made)]
    demand("R1", not remembered, f"{len(remembered)} used up and still alive: {remembered}")
    demand_no_more("R1", bases[0], bases[-1], f"after {CYCLES} cycles")


def _use(bench: Bench, use: str) -> list[tuple[str, weakref.ref[object]]]:
    """Weak references to what one use makes, where its class allows any."""
    found = []
    for made in USES[use](bench):
        with suppress(TypeError):
            found.append((type(made).__name__, weakref.ref(made)))
    return found


def _lives(made: weakref.ref[object]) -> bool:
    """Whether it is still there when everything unreachable is gone."""
    if made() is not None:
        gc.collect()
    return made() is not None


PROPERTIES = (
    Property(
        name="what-was-used-up-is-given-back",
        family="resources",
        clauses=("R1",),
        claim="Events, stores, readers, leases, pages, locks and graphs go when they are dropped.",
        programs=_programs,
        play=_play,
    ),
)
