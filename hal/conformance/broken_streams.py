"""Family *ordering*: what is left of a stream whose program raised."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import StreamFailed
from equipoise.hal.stream import Event, Role, Stream

MOST_STEPS = 6


class Planned(Exception):
    """What the programs of these programs raise."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    """Calls on one stream; one of them launches what raises."""
    step = st.sampled_from(("launch", "record", "raise")).map(Step)
    steps = st.lists(step, max_size=MOST_STEPS // 2)
    drawn = st.tuples(steps, st.just([Step("raise")]), steps)
    role = st.sampled_from([role.value for role in Role])
    return st.builds(
        lambda parts, role: program(chain(*parts), settings={"role": role}), drawn, role
    )


@dataclass
class _Desk:
    """The calls of a program on one stream.

    Attributes:
        flags: uint8, one a launch, raised when it runs.
        causes: what the launched programs raise, in the order of issue.
        events: recorded behind the first program that raises.
        issued: numbers of the launches that came before the first program that raises.
    """

    bench: Bench
    stream: Stream
    flags: Tensor
    causes: list[Planned] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    due: set[int] = field(default_factory=set)
    launched: int = 0

    def do(self, step: Step) -> None:
        """Make one call; it may already know of the failure."""
        calls = {"launch": self.launch, "raise": self.fail, "record": self.record}
        refusal = attempt(calls[step.op], StreamFailed)
        if refusal is not None:
            self.blames_the_first(step.op, refusal)

    def launch(self) -> None:
        number, flags = self.launched, self.flags
        self.launched += 1
        if not self.causes:
            self.due.add(number)
        self.stream.launch(lambda: flags[number].fill_(1))

    def fail(self) -> None:
        cause = Planned(f"number {len(self.causes)}")
        self.causes.append(cause)

        def program() -> None:
            raise cause

        self.stream.launch(program)

    def record(self) -> None:
        event = self.bench.accelerator.event()
        self.stream.record(event)
        if self.causes:
            self.events.append(event)

    def blames_the_first(self, what: str, refusal: BaseException | None) -> None:
        """The call raised, and its cause is what was raised first."""
        demand("E7", refusal, f"{what} on a stream that has failed raised nothing")
        cause = refusal.__cause__ if refusal is not None else None
        wanted = self.causes[0] if self.causes else None
        demand("E7", cause is wanted, f"{what} blames {cause!r} instead of {wanted!r}")


def _play(bench: Bench, found: Program) -> Play:
    stream = bench.accelerator.stream(Role(str(found.setting("role"))))
    before = bench.accelerator.event()
    stream.record(before)
    desk = _Desk(bench, stream, bench.filled((MOST_STEPS,), 0))
    for step in found.steps:
        desk.do(step)
        yield NEXT
    for what, call in _last_calls(bench, desk, before).items():
        desk.blames_the_first(what, attempt(call, StreamFailed))
    _passed_on(bench, stream, desk)
    ran = {number for number, flag in enumerate(desk.flags.tolist()) if flag}
    demand("E7", ran == desk.due, f"launches {sorted(ran)} ran, not {sorted(desk.due)}")


def _last_calls(bench: Bench, desk: _Desk, before: Event) -> dict[str, Callable[[], None]]:
    """Every call must raise once `synchronize` has told the host, which is the first of them."""
    stream, event = desk.stream, bench.accelerator.event()
    calls: dict[str, Callable[[], None]] = {
        "synchronize": partial(stream.synchronize, bench.patience),
        "launch": lambda: stream.launch(lambda: None),
        "wait": partial(stream.wait, before),
        "record": partial(stream.record, event),
        "the second synchronize": partial(stream.synchronize, bench.patience),
        "the accelerator's synchronize": partial(bench.accelerator.synchronize, bench.patience),
    }
    for number, recorded in enumerate(desk.events):
        calls[f"event {number}'s synchronize"] = partial(recorded.synchronize, bench.patience)
    return calls


def _passed_on(bench: Bench, stream: Stream, desk: _Desk) -> None:
    """Who waits for a recording that failed has failed; at the call, or when it comes there."""
    others = [bench.accelerator.stream(role) for role in Role if role != stream.role]
    for event, other in zip(desk.events, others, strict=False):
        refusal = attempt(partial(other.wait, event), StreamFailed)
        refusal = refusal or attempt(partial(other.synchronize, bench.patience), StreamFailed)
        demand("E7", refusal, "a stream that waits for a recording which failed goes on")


BROKEN_STREAM = Property(
    name="a-stream-whose-program-raised-says-so-at-every-call",
    family="ordering",
    clauses=("E7",),
    claim="After a program raised, nothing more runs on its stream, and calls raise that cause.",
    programs=_programs,
    play=_play,
)
