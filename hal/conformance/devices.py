"""Properties of family *resources* about backends and what their devices hand out."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.capabilities import Available, Capabilities, SlotFormat, Unavailable
from equipoise.hal.conformance.bench import (
    NEXT,
    Bench,
    Play,
    attempt,
    demand,
    native_stream,
    told,
)
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import Part, shelf
from equipoise.hal.errors import StreamFailed, Unsupported, Violation
from equipoise.hal.stream import Role, Stream

FAMILY = "resources"
LONGEST = 6
"""Steps of a program."""
SPAWNING = 60.0
"""Seconds that a fresh interpreter may take to import the backend."""


# ----- B1, B2: what is known before anything is opened --------------------------------------------


def _told(capabilities: Capabilities) -> str:
    """All that is declared, in one order."""
    fields = dataclasses.asdict(capabilities)
    return json.dumps({name: _plain(value) for name, value in fields.items()}, sort_keys=True)


def _plain(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, frozenset) else value


def _known(traits: Traits) -> st.SearchStrategy[Program]:
    """The traits were taken before the device was opened; the program remembers them."""
    declare = Step("declare", (_told(traits.accelerator),))
    steps = st.lists(st.sampled_from([Step("probe"), declare]), min_size=1, max_size=3)
    return steps.map(program)


def _play_known(bench: Bench, found: Program) -> Play:
    for step in found.steps:
        if step.op == "probe":
            _probe(bench)
        else:
            now = bench.backend.capabilities
            kept = isinstance(now, Capabilities) and _told(now) == step.args[0]
            demand("B2", kept, f"declared {step.args[0]} before the device was opened, {now} since")
        yield NEXT


def _probe(bench: Bench) -> None:
    before = bench.surroundings.leftovers()
    try:
        answer = bench.backend.probe()
    except Exception as error:
        raise Violation("B1", f"probe raised {type(error).__name__}: {error}") from error
    says = isinstance(answer, Available | Unavailable)
    demand("B1", says, f"probe answered {answer!r}, not available or why not")
    count = bench.backend.devices()
    fits = (count > 0) == isinstance(answer, Available)
    demand("B1", fits, f"probe answered {answer!r}, and {count} devices can be opened")
    demand_no_more("B1", before, bench.surroundings.leftovers(), "after a probe")


def demand_no_more(
    clause: str, before: Mapping[str, int], after: Mapping[str, int], when: str
) -> None:
    """Raise `Violation` where more is left over than before."""
    more = {name: count for name, count in after.items() if count > before.get(name, 0)}
    demand(clause, not more, f"{when} there are {more}, before there were {dict(before)}")


# ----- B4, B5, B6, R2: what a device hands out ----------------------------------------------------


def _asked(_: Traits) -> st.SearchStrategy[Program]:
    role = st.sampled_from([role.value for role in Role])
    steps = st.one_of(
        st.builds(lambda r: Step("stream", (r,)), role),
        st.builds(lambda n: Step("pinned", (n,)), st.integers(1, 64)),
        st.just(Step("adopt")),
    )
    return st.lists(steps, min_size=1, max_size=LONGEST).map(program)


@dataclass
class _Desk:
    """Asks for streams and memory, and compares what it is given with what it was given before."""

    bench: Bench
    streams: dict[str, Stream] = field(default_factory=dict)
    memory: list[Tensor] = field(default_factory=list)

    def do(self, step: Step) -> None:
        """Make one call."""
        if step.op == "stream":
            self.stream(str(step.args[0]))
        elif step.op == "pinned":
            self.pinned(int(step.args[0]))
        else:
            self.adopt()

    def stream(self, role: str) -> None:
        found = self.bench.accelerator.stream(Role(role))
        known = self.streams.setdefault(role, found)
        demand("B4", found is known, f"stream({role}) is another stream than before")
        demand("B4", found.role == role, f"stream({role}) says that its role is {found.role}")

    def pinned(self, nbytes: int) -> None:
        made = self.bench.accelerator.pinned(nbytes)
        kind = f"{made.dtype} {list(made.shape)} on {made.device}"
        fits = (made.dtype, made.device.type, made.shape) == (torch.uint8, "cpu", (nbytes,))
        demand("B6", fits, f"pinned({nbytes}) is {kind}, not uint8 [{nbytes}] on the host")
        if self.bench.accelerator.device.type != "cpu":
            locked = self.bench.backend.capabilities.pinned_memory
            demand("B6", made.is_pinned() or not locked, f"pinned({nbytes}) is not page-locked")
        self.memory.append(made.fill_(len(self.memory)))

    def adopt(self) -> None:
        """What no engine owns cannot be a stream; what is current on the device can."""
        refusal = attempt(lambda: self.bench.accelerator.adopt(object()), Unsupported)
        demand("B5", refusal, "something that is no stream was adopted")
        device = self.bench.accelerator.device
        if device.type != "cpu":
            stream = self.bench.accelerator.adopt(native_stream(device))
            seen = self.bench.filled((1,), 0)
            stream.launch(lambda: seen.fill_(1))
            stream.synchronize(self.bench.patience)
            demand("B5", int(told(seen)), "a launch on an adopted stream has not run")
            refusal = attempt(lambda: stream.launch(_raise), StreamFailed)
            cause = refusal.__cause__ if refusal is not None else None
            said = f"a launch on an adopted stream whose program raised raised {refusal!r}"
            demand("E7", isinstance(cause, ZeroDivisionError), said)
            stream.launch(lambda: seen.fill_(2))
            stream.synchronize(self.bench.patience)
            demand("E7", int(told(seen)) == 2, "an adopted stream does not go on after a failure")

    def end(self) -> None:
        """Nobody's memory is anybody else's."""
        for number, made in enumerate(self.memory):
            demand(
                "B6", bool((made == number).all()), f"pinned memory {number} was handed out twice"
            )


def _raise() -> None:
    raise ZeroDivisionError("a program of the suite raises")


def _play_asked(bench: Bench, found: Program) -> Play:
    desk = _Desk(bench)
    for step in found.steps:
        desk.do(step)
        yield NEXT
    desk.end()


_PRIVATE = Part(torch.uint8, 16, format=SlotFormat.PRIVATE)
OPTIONAL: Mapping[str, Callable[[Bench], object]] = {
    "stream_lock": lambda bench: bench.accelerator.stream_lock(bench.deadline),
    "graph_capture": lambda bench: bench.accelerator.graph(),
    "slot_formats": lambda bench: shelf(bench, 1, 1, [_PRIVATE]),
}
"""By capability, what may be called where it is declared, and nowhere else."""


def _optional(_: Traits) -> st.SearchStrategy[Program]:
    return st.sampled_from(sorted(OPTIONAL)).map(lambda name: program([Step(name)]))


def _play_optional(bench: Bench, found: Program) -> Play:
    """The memory of a slot is made before the store is asked for; it is dropped with the error."""
    name = found.steps[0].op
    declared = _declares(bench.backend.capabilities, name)
    before = dict(bench.surroundings.leftovers())
    try:
        OPTIONAL[name](bench)
    except Unsupported as refusal:
        demand("R2", not declared, f"{name} is declared, yet: {refusal}")
        yield NEXT
        demand_no_more("R2", before, bench.surroundings.leftovers(), "after a refusal")
    except Exception as error:
        what = f"{type(error).__name__}: {error}, not Unsupported"
        raise Violation("R2", f"{name} is not declared and raised {what}") from error
    else:
        demand("R2", declared, f"{name} is not declared, yet the call was accepted")


def _declares(capabilities: Capabilities, name: str) -> bool:
    if name == "slot_formats":
        return SlotFormat.PRIVATE in capabilities.slot_formats
    return bool(getattr(capabilities, name))


# ----- R4: importing ------------------------------------------------------------------------------

LOOK = """
import importlib, os, sys, torch

def tasks():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1

def awake():
    device = torch.accelerator.current_accelerator()
    return device is not None and torch.get_device_module(device).is_initialized()

before = tasks()
importlib.import_module(sys.argv[1])
print("threads", tasks() - before, "devices", int(awake()))
"""
"""Prints what importing a module has started in a fresh interpreter."""


@functools.cache
def _started_by(module: str) -> str:
    """What an interpreter says that has imported `module` and nothing else of the backend's."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, module],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=SPAWNING,
        check=False,
    )
    last = (done.stdout or done.stderr).strip().splitlines()[-1:]
    return last[0] if last else f"nothing, exit status {done.returncode}"


def _import(_: Traits) -> st.SearchStrategy[Program]:
    return st.just(program([Step("import")]))


def _play_import(bench: Bench, _: Program) -> Play:
    module = type(bench.backend).__module__
    said = _started_by(module)
    demand("R4", said == "threads 0 devices 0", f"importing {module} in a fresh process: {said}")
    yield NEXT


PROPERTIES = (
    Property(
        name="a-backend-is-known-before-it-is-opened",
        family=FAMILY,
        clauses=("B2", "B1"),
        claim="Probing answers and opens nothing; what is declared before opening stays true.",
        programs=_known,
        play=_play_known,
    ),
    Property(
        name="a-device-hands-out-the-same-streams-and-its-own-memory",
        family=FAMILY,
        clauses=("B4", "B5", "B6", "E7"),
        claim="One stream a role, no stream from what is none, host memory that nobody shares.",
        programs=_asked,
        play=_play_asked,
    ),
    Property(
        name="what-is-not-declared-is-refused",
        family=FAMILY,
        clauses=("R2",),
        claim="Where a capability is declared the call works, where it is not it is Unsupported.",
        programs=_optional,
        play=_play_optional,
    ),
    Property(
        name="importing-a-backend-starts-nothing",
        family=FAMILY,
        clauses=("R4",),
        claim="A fresh process that imports the backend has no more threads, and no device awake.",
        programs=_import,
        play=_play_import,
    ),
)
