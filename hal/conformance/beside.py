"""What runs while some streams cannot: the part that two families share."""

from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand, told
from equipoise.hal.conformance.needs import side_by_side
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Traits
from equipoise.hal.errors import StreamTimeout
from equipoise.hal.stream import Event, Role, Stream

MOST_STEPS = 8

Stop = Callable[[Stream], Callable[[], None]]
"""Keeps a stream from running what is launched from now on, until the result is called."""


def programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Launches on streams that run side by side; each stream is stopped at most once."""
    role = st.sampled_from(side_by_side(traits))
    step = st.builds(lambda op, role: Step(op, (role,)), st.sampled_from(("launch", "stop")), role)
    return st.lists(step, min_size=1, max_size=MOST_STEPS).map(lambda steps: program(_once(steps)))


def _once(steps: list[Step]) -> list[Step]:
    """Without a second stop of a stream."""
    return [s for n, s in enumerate(steps) if s.op == "launch" or s not in steps[:n]]


def play(bench: Bench, found: Program, clause: str, stop: Stop) -> Play:
    """What is launched on streams that are not stopped ends while the others stand still."""
    flags = bench.filled((MOST_STEPS,), 0)
    stopped: dict[str, Callable[[], None]] = {}
    free: dict[int, Event] = {}
    for number, step in enumerate(found.steps):
        role = str(step.args[0])
        stream = bench.accelerator.stream(Role(role))
        if step.op == "stop":
            stopped[role] = stop(stream)
        else:
            stream.launch(partial(flags[number].fill_, 1))
            if role not in stopped:
                free[number] = bench.accelerator.event()
                stream.record(free[number])
        yield NEXT
    for number, passed in free.items():
        late = attempt(partial(passed.synchronize, bench.patience), StreamTimeout)
        what = f"{found.steps[number]} does not end while {', '.join(stopped)} cannot go on"
        demand(clause, not late, what)
    for let_go in stopped.values():
        let_go()
    bench.drain()
    ran = told(flags).tolist()
    for number, step in enumerate(found.steps):
        demand(clause, ran[number] == (step.op == "launch"), f"{step} never ran")
