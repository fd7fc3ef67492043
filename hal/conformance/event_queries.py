"""Family *ordering*: what an event says by itself, without a lock that holds the stream."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand, told
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.stream import Event, Role, Stream

EVENTS = 2
MOST = 7
ROLES = tuple(role.value for role in Role)[:2]
LOOKS = 40
"""How often an event is asked until it has to be waited for."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """`launch(role, event)` of a mark and a recording behind it, then questions to events."""
    event, role = st.integers(0, EVENTS - 1), st.sampled_from(ROLES)
    steps = st.one_of(
        st.builds(lambda r, e: Step("launch", (r, e)), role, event),
        st.builds(lambda e: Step("query", (e,)), event),
        st.builds(lambda e: Step("synchronize", (e,)), event),
        st.just(Step("pause")),
    )
    first = st.builds(lambda r, e: Step("launch", (r, e)), role, event)
    return st.builds(
        lambda first, rest: program([first, *rest]), first, st.lists(steps, max_size=MOST)
    )


@dataclass
class _Desk:
    """Each launch counts a number up; an event knows the number that stood behind its recording.

    Attributes:
        marks: int, one a stream: how many launches of it have run.
        due: by event, the stream and the count that its latest recording stands for.
        ran: by event, whether it has said that it was reached.
    """

    bench: Bench
    marks: dict[str, Tensor]
    launched: dict[str, int] = field(default_factory=dict)
    events: dict[int, Event] = field(default_factory=dict)
    due: dict[int, tuple[str, int]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)

    def stream(self, role: str) -> Stream:
        return self.bench.accelerator.stream(Role(role))

    def launch(self, role: str, event: int) -> None:
        """A delay of the executor's choice, a mark, a recording."""
        stream, mark = self.stream(role), self.marks[role]
        self.bench.disturb(stream)
        self.launched[role] = count = self.launched.get(role, 0) + 1
        stream.launch(lambda: mark.fill_(count))
        self.events.setdefault(event, self.bench.accelerator.event())
        stream.record(self.events[event])
        self.due[event] = (role, count)
        self.reached.discard(event)

    def query(self, event: int) -> bool:
        """Ask; what is reached has run, and stays reached."""
        if event not in self.events:
            return False
        said = self.events[event].query()
        what = f"event {event} was reached, and is not any more"
        demand("O7", said or event not in self.reached, what)
        if said:
            self.ran(event, "query says that it was reached")
        return said

    def synchronize(self, event: int) -> None:
        """Wait; what was waited for has run, and says so."""
        if event in self.events:
            self.events[event].synchronize(self.bench.patience)
            self.ran(event, "synchronize has returned")
            demand("O7", self.events[event].query(), f"event {event} was waited for, query denies")

    def ran(self, event: int, why: str) -> None:
        """What stands before its recording has happened."""
        self.reached.add(event)
        role, count = self.due[event]
        seen = int(told(self.marks[role]))
        demand("O7", seen >= count, f"event {event}: {why}, ahead of launch {count} on {role}")


def _play(bench: Bench, found: Program) -> Play:
    desk = _Desk(bench, {role: bench.filled((1,), 0) for role in ROLES})
    for step in found.steps:
        if step.op == "launch":
            desk.launch(str(step.args[0]), int(step.args[1]))
            desk.query(int(step.args[1]))
        elif step.op == "query":
            desk.query(int(step.args[0]))
        elif step.op == "synchronize":
            desk.synchronize(int(step.args[0]))
        yield NEXT
    bench.drain()
    for event in desk.events:
        reached = any(desk.query(event) for _ in range(LOOKS))
        demand("O7", reached, f"all streams have drained, and event {event} is not reached")


EVENT_POINTS = Property(
    name="an-event-says-when-its-point-is-reached",
    family="ordering",
    clauses=("O7",),
    claim="Neither query nor synchronize is ahead of what was launched, or behind for ever.",
    programs=_programs,
    play=_play,
)
