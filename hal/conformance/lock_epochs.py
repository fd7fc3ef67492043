"""Family *locks*: the verbs of a lock in any order, compared with a model of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand
from equipoise.hal.conformance.lock_model import Errors, LockModel
from equipoise.hal.conformance.needs import a_lock
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import StreamError, StreamTimeout
from equipoise.hal.lock import StreamLock
from equipoise.hal.stream import Event, Role, Stream

BRIEF = 0.02
"""Seconds for a wait that must end in vain."""
OPS = ("section", "signal", "wait", "drain", "poison", "late signal", "late wait")
MOST_STEPS = 10
ROUNDS = (("signal", "section", "wait"), ("section", "signal", "wait"))
"""One hand-over and back, the signal early or late: what verbs in any order seldom come to."""
MOST_ROUNDS = 4


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    verbs = st.lists(st.sampled_from(OPS), min_size=1, max_size=MOST_STEPS)
    rounds = st.lists(st.sampled_from(ROUNDS), min_size=2, max_size=MOST_ROUNDS)
    drawn = st.one_of(verbs, rounds.map(lambda found: list(chain(*found))))
    return drawn.map(lambda ops: program(_valid([Step(op) for op in ops])))


def _valid(steps: list[Step]) -> list[Step]:
    """Nobody is late in the first epoch."""
    model, kept = LockModel(), []
    for step in steps:
        if model.epoch or not step.op.startswith("late"):
            _due(model, step.op)
            kept.append(step)
    return kept


def _due(model: LockModel, op: str) -> Errors:
    """What the model says to a step."""
    verbs: dict[str, Callable[[], Errors]] = {
        "section": model.section,
        "signal": model.signal,
        "wait": model.wait,
        "drain": model.drain,
        "poison": model.poison,
        "late signal": model.late,
        "late wait": model.late,
    }
    return verbs[op]()


@dataclass
class _Desk:
    """A lock, one stream, and the events behind its acquires."""

    bench: Bench
    lock: StreamLock
    stream: Stream
    model: LockModel = field(default_factory=LockModel)
    entered: list[Event] = field(default_factory=list)

    def do(self, op: str) -> None:
        """Make one call, and compare what it raises with what the model says."""
        epoch, clause = self.model.epoch, self.clause(op)
        due = _due(self.model, op)
        patience = BRIEF if due == (StreamTimeout,) else self.bench.patience
        raised = attempt(partial(self.call, op, epoch, patience), StreamError)
        fits = isinstance(raised, due) if due else raised is None
        names = " or ".join(error.__name__ for error in due) or "nothing"
        demand(clause, fits, f"{op} in epoch {epoch} raised {raised!r}, not {names}")

    def call(self, op: str, epoch: int, patience: float) -> None:
        lock = self.lock
        calls: dict[str, Callable[[], object]] = {
            "section": self.section,
            "signal": partial(lock.signal, epoch),
            "wait": partial(lock.wait, epoch, patience),
            "drain": partial(lock.drain, patience),
            "poison": lock.poison,
            "late signal": partial(lock.signal, epoch - 1),
            "late wait": partial(lock.wait, epoch - 1, patience),
        }
        calls[op]()

    def section(self) -> None:
        event = self.bench.accelerator.event()
        self.lock.acquire(self.stream)
        self.stream.record(event)
        self.lock.release(self.stream)
        self.entered.append(event)

    def clause(self, op: str) -> str:
        """Which one a wrong answer breaks: void epochs first, then those that are not the first."""
        if op == "poison" or (self.model.poisoned and not op.startswith("late")):
            return "L6"
        return "L3" if self.model.epoch or op == "drain" else "O5"

    def look(self) -> None:
        """Compare what the host can see at any time."""
        model, clause = self.model, self.clause("look")
        demand("L3", self.lock.epoch == model.epoch, f"epoch {self.lock.epoch}, not {model.epoch}")
        told = attempt(self.lock.check, *model.check() or (StreamError,))
        demand(clause, bool(told) == model.poisoned, f"check says {told!r}")
        inside = sum(event.query() for event in self.entered)
        what = f"{inside} sections have begun, though only {model.passed} may"
        demand(clause, inside <= model.passed, what)

    def settle(self) -> None:
        """What may pass passes, and nothing else."""
        clause = self.clause("look")
        for number, event in enumerate(self.entered):
            due = number < self.model.passed
            patience = self.bench.patience if due else BRIEF
            late = attempt(partial(event.synchronize, patience), StreamTimeout)
            demand(clause, (late is None) == due, f"section {number}: passed is {late is None}")


def _play(bench: Bench, found: Program) -> Play:
    stream = bench.accelerator.stream(Role.COMPUTE)
    desk = _Desk(bench, bench.accelerator.stream_lock(bench.patience), stream)
    for step in found.steps:
        desk.do(step.op)
        yield NEXT
        desk.look()
    desk.settle()
    desk.lock.poison()
    bench.drain()


EPOCHS = Property(
    name="a-lock-does-what-its-model-does",
    family="locks",
    clauses=("O5", "L3", "L6"),
    claim="Out of turn, late or void: every verb says so, nothing leaks into the next epoch.",
    programs=_programs,
    play=_play,
    needs=a_lock,
)
