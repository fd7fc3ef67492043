"""Family *resources*: devices that are closed, and what a device says of itself."""

import threading
from functools import partial

from hypothesis import strategies as st

from equipoise.hal.accelerator import Memory, Topology
from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand, told
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import StreamFailed
from equipoise.hal.stream import Role

FAMILY = "resources"
ROLES = tuple(role.value for role in Role)
ENDING = 5.0
"""Seconds that a thread may take which close has told to end."""


def _closed(_: Traits) -> st.SearchStrategy[Program]:
    """`launch(role)` on a device of its own, which is then closed, once or twice."""
    launches = st.lists(st.sampled_from(ROLES), max_size=4)
    return st.builds(
        lambda roles, times: program(
            [*(Step("launch", (role,)) for role in roles), *[Step("close")] * times]
        ),
        launches,
        st.integers(1, 2),
    )


def _play_closed(bench: Bench, found: Program) -> Play:
    before = set(threading.enumerate())
    extra = bench.backend.open(0)
    flag = bench.filled((1,), 0)
    for step in found.steps:
        if step.op == "launch":
            extra.stream(Role(str(step.args[0]))).launch(lambda: None)
        else:
            extra.close()
        yield NEXT
    for role in ROLES:
        stream = extra.stream(Role(role))
        for what, call in (
            ("launch", partial(stream.launch, partial(flag.fill_, 1))),
            ("record", partial(stream.record, extra.event())),
        ):
            refused = attempt(call, StreamFailed)
            demand("E5", refused, f"{what} on stream {role} of a device that was closed")
    demand("E5", int(told(flag)) == 0, "a launch on a device that was closed has run")
    later = [thread for thread in threading.enumerate() if thread not in before]
    for thread in later:
        thread.join(ENDING)
    alive = [thread.name for thread in later if thread.is_alive()]
    demand("E5", not alive, f"threads that outlive the close of their device: {alive}")


def _said(_: Traits) -> st.SearchStrategy[Program]:
    steps = st.sampled_from((Step("memory"), Step("topology")))
    return st.lists(steps, min_size=1, max_size=3).map(program)


def _play_said(bench: Bench, found: Program) -> Play:
    accelerator = bench.accelerator
    first = accelerator.topology()
    for step in found.steps:
        if step.op == "memory":
            _sound_memory(accelerator.memory())
        else:
            _sound_topology(accelerator.topology())
            demand("B10", accelerator.topology() == first, "the topology is another than before")
        yield NEXT
    demand("B10", first.index == 0, f"device 0 says that its index is {first.index}")
    name, backend = accelerator.name, bench.backend.name
    named = name.startswith(backend) and name.endswith(str(first.index))
    demand("B10", named, f"device 0 of {backend} is called {name!r}")


def _sound_memory(said: Memory) -> None:
    sound = said.total > 0 and 0 <= said.free <= said.total
    demand("B10", sound, f"{said.free} bytes of {said.total} are free")


def _sound_topology(said: Topology) -> None:
    demand("B10", bool(said.node), "the node has no name")
    demand("B10", said.numa >= -1, f"the NUMA node is {said.numa}")


PROPERTIES = (
    Property(
        name="a-closed-device-takes-nothing",
        family=FAMILY,
        clauses=("E5",),
        claim="After close every launch is refused, no thread is left, and close may come again.",
        programs=_closed,
        play=_play_closed,
    ),
    Property(
        name="a-device-says-what-it-is",
        family=FAMILY,
        clauses=("B10",),
        claim="Memory and topology are within their bounds, and stay what they are.",
        programs=_said,
        play=_play_said,
    ),
)
