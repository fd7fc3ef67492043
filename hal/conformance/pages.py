"""Property of family *addresses* about the host pool: pages under copies in flight."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import ROLES, Shelf, listed, plain, versions
from equipoise.hal.errors import PoolExhausted, SlotError
from equipoise.hal.pool import HostPool, Page
from equipoise.hal.stream import Event

LONGEST = 10
"""Steps of a program: at most as many slots are written."""
WIDTH = 8
"""Bytes of a page and of a slot."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    copy = st.builds(lambda role: Step("copy", (role,)), st.sampled_from(ROLES))
    steps = st.one_of(st.just(Step("take")), copy, st.just(Step("give_back")))
    return st.lists(steps, min_size=1, max_size=LONGEST).map(lambda drawn: program(_valid(drawn)))


def _valid(steps: list[Step]) -> list[Step]:
    """Only a page in hand is copied, or given back."""
    held, kept = False, []
    for step in steps:
        if step.op == "take" or held:
            held = step.op != "give_back"
            kept.append(step)
    return kept


@dataclass
class _Desk:
    """Takes the one page there is, fills it, lets copies read it, gives it back behind the last.

    Attributes:
        page: the page in hand.
        version: what it was filled with.
        last: recorded behind the last copy that reads it.
        due: the version of each copy.
    """

    place: Shelf
    pool: HostPool
    page: Page | None = None
    version: int = 0
    last: Event | None = None
    due: list[int] = field(default_factory=list)

    def do(self, number: int, step: Step) -> None:
        """Make one call."""
        if step.op == "take":
            self.take(number)
        elif self.page is not None and step.op == "copy":
            self.copy(self.page, str(step.args[0]))
        elif self.page is not None:
            self.give_back(self.page)

    def take(self, number: int) -> None:
        """The page is filled at once: if a copy still reads it, that copy shows it."""
        if self.page is not None:
            refusal = attempt(lambda: self.pool.take(0.0), PoolExhausted)
            demand("A13", refusal, f"step {number}: the page in hand was handed out again")
            return
        self.page = self.pool.take(self.place.bench.patience)
        self.page.data.fill_(number)
        self.version, self.last = number, None

    def copy(self, page: Page, role: str) -> None:
        """Into a slot of its own, behind the page's earlier copies."""
        stream = self.place.stream(role)
        if self.last is not None:
            stream.wait(self.last)
        self.place.store.write([len(self.due)], [[page.data]], stream)
        self.due.append(self.version)
        self.last = self.place.bench.accelerator.event()
        stream.record(self.last)

    def give_back(self, page: Page) -> None:
        """Once."""
        page.give_back(self.last)
        self.page = None
        again = attempt(lambda: page.give_back(None), SlotError)
        demand("A13", again, f"the page of version {self.version} could be given back twice")


def _play(bench: Bench, found: Program) -> Play:
    place = plain(bench, LONGEST, 0, WIDTH)
    desk = _Desk(place, bench.accelerator.host_pool(WIDTH, 1))
    for number, step in enumerate(found.steps, start=1):
        desk.do(number, step)
        yield NEXT
    bench.drain()
    for slot, version in enumerate(desk.due):
        seen = versions(place.bytes_of(slot))
        what = f"copy {slot} read version {listed(seen)} of its page, not {version}"
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
