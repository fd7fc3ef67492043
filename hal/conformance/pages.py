"""Property of family *addresses* about the host pool: pages under copies in flight."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import ROLES, Shelf, plain, versions
from equipoise.hal.errors import PoolExhausted, SlotError
from equipoise.hal.pool import HostPool, Page
from equipoise.hal.stream import Event

PAGES = 2
LONGEST = 10
"""Steps of a program: at most as many slots are written."""
WIDTH = 8
"""Bytes of a page and of a slot."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    page = st.integers(0, PAGES - 1)
    steps = st.one_of(
        st.builds(lambda: Step("take")),
        st.builds(lambda p, role: Step("copy", (p, role)), page, st.sampled_from(ROLES)),
        st.builds(lambda p: Step("give_back", (p,)), page),
    )
    return st.lists(steps, min_size=2, max_size=LONGEST).map(program)


@dataclass
class _Desk:
    """Takes pages, fills them, lets copies read them, gives them back behind the last copy.

    Steps name the pages in hand by their order; what names none is left out.
    """

    place: Shelf
    pool: HostPool
    hand: list[tuple[Page, int]] = field(default_factory=list)
    reads: dict[int, Event] = field(default_factory=dict)
    due: list[int] = field(default_factory=list)

    def do(self, number: int, step: Step) -> None:
        """Make one call, if it can be made."""
        if step.op == "take":
            self.take(number)
        elif int(step.args[0]) >= len(self.hand):
            return
        elif step.op == "copy":
            self.copy(int(step.args[0]), str(step.args[1]))
        else:
            self.give_back(int(step.args[0]))

    def take(self, number: int) -> None:
        """The page is filled at once: if a copy still reads it, that copy shows it."""
        if len(self.hand) == PAGES:
            refusal = attempt(lambda: self.pool.take(0.0), PoolExhausted)
            demand("A13", refusal, f"step {number}: a page beyond the {PAGES} there are")
            return
        page = self.pool.take(self.place.bench.patience)
        page.data.fill_(number)
        self.hand.append((page, number))

    def copy(self, which: int, role: str) -> None:
        """Into a slot of its own, behind the page's earlier copies."""
        (page, version), stream = self.hand[which], self.place.stream(role)
        if version in self.reads:
            stream.wait(self.reads[version])
        self.place.store.write([len(self.due)], [[page.data]], stream)
        self.due.append(version)
        self.reads[version] = self.place.bench.accelerator.event()
        stream.record(self.reads[version])

    def give_back(self, which: int) -> None:
        page, version = self.hand.pop(which)
        page.give_back(self.reads.get(version))
        again = attempt(lambda: page.give_back(None), SlotError)
        demand("A13", again, f"page of version {version} could be given back twice")


def _play(bench: Bench, found: Program) -> Play:
    place = plain(bench, LONGEST, 0, WIDTH)
    desk = _Desk(place, bench.accelerator.host_pool(WIDTH, PAGES))
    for number, step in enumerate(found.steps, start=1):
        desk.do(number, step)
        yield NEXT
    bench.drain()
    for slot, version in enumerate(desk.due):
        seen = versions(place.bytes_of(slot))
        what = f"copy {slot} read version {' and '.join(map(str, seen))} of its page, not {version}"
        demand("A13", seen == [version], what)


PROPERTIES = (
    Property(
        name="a-page-is-not-handed-out-under-a-copy",
        family="addresses",
        clauses=("A13",),
        claim="A page of the host pool comes back only when the copies that read it have ended.",
        programs=_programs,
        play=_play,
    ),
)
