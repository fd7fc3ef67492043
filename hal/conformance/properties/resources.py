"""Family *resources*: what is declared, handed out, given back and closed."""

import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.accelerator import Memory, Topology
from equipoise.hal.capabilities import Available, Capabilities, SlotFormat, Unavailable
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    catch,
    native_stream,
    require,
    to_host,
)
from equipoise.hal.conformance.fixtures.slot_store import (
    SLOT_ROLES,
    SegmentSpec,
    make_plain_slot_store,
    make_slot_store,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties import resources_signatures
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import StreamFailed, Unsupported, Violation
from equipoise.hal.stream import Role, Stream

FAMILY = "resources"
MAX_STEPS = 6
"""Steps of a program."""
SPAWN_TIMEOUT = 60.0
"""Seconds that a fresh interpreter may take to import the backend."""


# ----- B1, B2: what is known before anything is opened --------------------------------------------


def _capabilities_json(capabilities: Capabilities) -> str:
    """All that is declared, in one order."""
    fields = dataclasses.asdict(capabilities)
    return json.dumps({name: _jsonable(value) for name, value in fields.items()}, sort_keys=True)


def _jsonable(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, frozenset) else value


def _declaration_programs(traits: Traits) -> st.SearchStrategy[Program]:
    """The traits were taken before the device was opened; the program remembers them."""
    declare = Step("declare", (_capabilities_json(traits.accelerator),))
    steps = st.lists(st.sampled_from([Step("probe"), declare]), min_size=1, max_size=3)
    return steps.map(make_program)


def _play_declarations(ctx: RankContext, program: Program) -> Play:
    for step in program.steps:
        if step.op == "probe":
            _probe(ctx)
        else:
            now = ctx.backend.capabilities
            is_unchanged = isinstance(now, Capabilities) and _capabilities_json(now) == step.args[0]
            require(
                "B2",
                is_unchanged,
                f"declared {step.args[0]} before the device was opened, {now} since",
            )
        yield NEXT


def _probe(ctx: RankContext) -> None:
    before = ctx.environment.leftovers()
    try:
        answer = ctx.backend.probe()
    except Exception as error:
        raise Violation("B1", f"probe raised {type(error).__name__}: {error}") from error
    says = isinstance(answer, Available | Unavailable)
    require("B1", says, f"probe answered {answer!r}, not available or why not")
    count = ctx.backend.devices()
    fits = (count > 0) == isinstance(answer, Available)
    require("B1", fits, f"probe answered {answer!r}, and {count} devices can be opened")
    require_no_more("B1", before, ctx.environment.leftovers(), "after a probe")


def require_no_more(
    clause: str, before: Mapping[str, int], after: Mapping[str, int], when: str
) -> None:
    """Raise `Violation` where more is left over than before."""
    more = {name: count for name, count in after.items() if count > before.get(name, 0)}
    require(clause, not more, f"{when} there are {more}, before there were {dict(before)}")


# ----- B4, B5, B6, R2: what a device hands out ----------------------------------------------------


def _device_programs(_: Traits) -> st.SearchStrategy[Program]:
    role = st.sampled_from([role.value for role in Role])
    steps = st.one_of(
        st.builds(lambda r: Step("stream", (r,)), role),
        st.builds(lambda n: Step("pinned", (n,)), st.integers(1, 64)),
        st.just(Step("adopt")),
    )
    return st.lists(steps, min_size=1, max_size=MAX_STEPS).map(make_program)


@dataclass
class _DeviceRunner:
    """Asks for streams and memory, and compares the results with earlier ones."""

    ctx: RankContext
    streams: dict[str, Stream] = field(default_factory=dict)
    memory: list[Tensor] = field(default_factory=list)

    def run_step(self, step: Step) -> None:
        """Make one call."""
        if step.op == "stream":
            self.stream(str(step.args[0]))
        elif step.op == "pinned":
            self.pinned(int(step.args[0]))
        else:
            self.adopt()

    def stream(self, role: str) -> None:
        stream = self.ctx.accelerator.stream(Role(role))
        first_stream = self.streams.setdefault(role, stream)
        require("B4", stream is first_stream, f"stream({role}) is another stream than before")
        require("B4", stream.role == role, f"stream({role}) says that its role is {stream.role}")

    def pinned(self, nbytes: int) -> None:
        buffer = self.ctx.accelerator.pinned(nbytes)
        kind = f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}"
        fits = (buffer.dtype, buffer.device.type, buffer.shape) == (torch.uint8, "cpu", (nbytes,))
        require("B6", fits, f"pinned({nbytes}) is {kind}, not uint8 [{nbytes}] on the host")
        if self.ctx.accelerator.device.type != "cpu":
            can_pin = self.ctx.backend.capabilities.pinned_memory
            require("B6", buffer.is_pinned() or not can_pin, f"pinned({nbytes}) is not page-locked")
        self.memory.append(buffer.fill_(len(self.memory)))

    def adopt(self) -> None:
        """What no engine owns cannot be a stream; what is current on the device can."""
        refusal = catch(lambda: self.ctx.accelerator.adopt(object()), Unsupported)
        require("B5", refusal, "something that is no stream was adopted")
        device = self.ctx.accelerator.device
        if device.type != "cpu":
            stream = self.ctx.accelerator.adopt(native_stream(device))
            flag = self.ctx.full((1,), 0)
            stream.launch(lambda: flag.fill_(1))
            stream.synchronize(self.ctx.timeout)
            require("B5", int(to_host(flag)), "a launch on an adopted stream has not run")
            refusal = catch(lambda: stream.launch(_raise), StreamFailed)
            cause = refusal.__cause__ if refusal is not None else None
            text = f"a launch on an adopted stream whose program raised raised {refusal!r}"
            require("E7", isinstance(cause, ZeroDivisionError), text)
            stream.launch(lambda: flag.fill_(2))
            stream.synchronize(self.ctx.timeout)
            require(
                "E7", int(to_host(flag)) == 2, "an adopted stream does not go on after a failure"
            )

    def end(self) -> None:
        """No two buffers share memory."""
        for number, buffer in enumerate(self.memory):
            require(
                "B6", bool((buffer == number).all()), f"pinned memory {number} was handed out twice"
            )


def _raise() -> None:
    raise ZeroDivisionError("a program of the suite raises")


def _play_device(ctx: RankContext, program: Program) -> Play:
    runner = _DeviceRunner(ctx)
    for step in program.steps:
        runner.run_step(step)
        yield NEXT
    runner.end()


_PRIVATE = SegmentSpec(torch.uint8, 16, format=SlotFormat.PRIVATE)
OPTIONAL: Mapping[str, Callable[[RankContext], object]] = {
    "stream_lock": lambda ctx: ctx.accelerator.stream_lock(ctx.deadline),
    "graph_capture": lambda ctx: ctx.accelerator.graph(),
    "slot_formats": lambda ctx: make_slot_store(ctx, 1, 1, [_PRIVATE]),
}
"""By capability, what may be called where it is declared, and nowhere else."""


def _optional(_: Traits) -> st.SearchStrategy[Program]:
    return st.sampled_from(sorted(OPTIONAL)).map(lambda name: make_program([Step(name)]))


def _play_optional(ctx: RankContext, program: Program) -> Play:
    """The memory of a slot is made before the store is asked for; it is dropped with the error."""
    name = program.steps[0].op
    declared = _declares(ctx.backend.capabilities, name)
    before = dict(ctx.environment.leftovers())
    try:
        OPTIONAL[name](ctx)
    except Unsupported as refusal:
        require("R2", not declared, f"{name} is declared, yet: {refusal}")
        yield NEXT
        require_no_more("R2", before, ctx.environment.leftovers(), "after a refusal")
    except Exception as error:
        what = f"{type(error).__name__}: {error}, not Unsupported"
        raise Violation("R2", f"{name} is not declared and raised {what}") from error
    else:
        require("R2", declared, f"{name} is not declared, yet the call was accepted")


def _declares(capabilities: Capabilities, name: str) -> bool:
    if name == "slot_formats":
        return SlotFormat.PRIVATE in capabilities.slot_formats
    return bool(getattr(capabilities, name))


# ----- R4: importing ------------------------------------------------------------------------------

IMPORT_PROBE = """
import importlib, os, sys, torch

def tasks():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1

def awake():
    device = torch.accelerator.current_accelerator()
    module = device and torch.get_device_module(device)
    return hasattr(module, "is_initialized") and module.is_initialized()

before = tasks()
importlib.import_module(sys.argv[1])
print("threads", tasks() - before, "devices", int(awake()))
"""
"""Prints what importing a module has started in a fresh interpreter."""


@functools.cache
def _started_by_import(module: str) -> str:
    """What an interpreter says that has imported `module` and nothing else of the backend's."""
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE, module],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=SPAWN_TIMEOUT,
        check=False,
    )
    last = (process.stdout or process.stderr).strip().splitlines()[-1:]
    return last[0] if last else f"nothing, exit status {process.returncode}"


def _import(_: Traits) -> st.SearchStrategy[Program]:
    return st.just(make_program([Step("import")]))


def _play_import(ctx: RankContext, _: Program) -> Play:
    module = type(ctx.backend).__module__
    started = _started_by_import(module)
    require(
        "R4", started == "threads 0 devices 0", f"importing {module} in a fresh process: {started}"
    )
    yield NEXT


DEVICES = (
    Property(
        name="probe-opens-nothing-and-capabilities-are-frozen",
        family=FAMILY,
        clauses=("B2", "B1"),
        claim="Probing answers and opens nothing; what is declared before opening stays true.",
        programs=_declaration_programs,
        play=_play_declarations,
    ),
    Property(
        name="streams-are-cached-by-role-and-pinned-memory-is-not-shared",
        family=FAMILY,
        clauses=("B4", "B5", "B6", "E7"),
        claim="One stream a role, no stream from what is none, host memory that nobody shares.",
        programs=_device_programs,
        play=_play_device,
    ),
    Property(
        name="undeclared-capabilities-raise-unsupported",
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


REPEATS = 3
"""How often a program is repeated: the first time may leave what is kept once for all."""
WIDTH = 8
"""Bytes of a slot, and of a page."""
Resources = Iterator[object]
"""Weak references to created objects, to see whether they are still alive."""


def _events(ctx: RankContext) -> Resources:
    first, second = (ctx.accelerator.stream(Role(role)) for role in SLOT_ROLES[:2])
    event = ctx.accelerator.event()
    first.record(event)
    second.wait(event)
    yield event


def _slots(ctx: RankContext) -> Resources:
    place = make_plain_slot_store(ctx, 1, 1, WIDTH)
    reader = place.store.attach(ctx.accelerator.stream(Role(SLOT_ROLES[0])))
    lease = place.store.lease([0])
    lease.release()
    place.unpack([0], 1, SLOT_ROLES[1])
    place.store.commit([(0, 0)], place.stream(SLOT_ROLES[2]))
    blob = place.read_in_launch([0], SLOT_ROLES[0])
    reader.detach()
    yield from (place.store, reader, lease, blob, place.pack([0], SLOT_ROLES[1]))


def _pages(ctx: RankContext) -> Resources:
    pool = ctx.accelerator.host_pool(WIDTH, 1)
    page = pool.take(ctx.timeout)
    page.give_back(None)
    yield from (pool, page)


def _lock(ctx: RankContext) -> Resources:
    lock, stream = ctx.accelerator.stream_lock(ctx.deadline), SLOT_ROLES[0]
    lock.signal(lock.epoch)
    lock.acquire(ctx.accelerator.stream(Role(stream)))
    lock.release(ctx.accelerator.stream(Role(stream)))
    lock.wait(lock.epoch, ctx.timeout)
    yield lock


def _graph(ctx: RankContext) -> Resources:
    graph, stream = ctx.accelerator.graph(), ctx.accelerator.stream(Role(SLOT_ROLES[0]))
    cell = ctx.full((1,), 0)
    graph.capture(stream, lambda: stream.launch(lambda: cell.fill_(1)))
    graph.replay(stream)
    yield from (graph, cell)


USES: Mapping[str, Callable[[RankContext], Resources]] = {
    "events": _events,
    "slots": _slots,
    "pages": _pages,
    "stream_lock": _lock,
    "graph_capture": _graph,
}
"""One use of each kind of thing; a capability has the name of its use."""


def _use_programs(traits: Traits) -> st.SearchStrategy[Program]:
    declared = [use for use in USES if getattr(traits.accelerator, use, True)]
    steps = st.lists(st.sampled_from(declared).map(Step), min_size=1, max_size=4)
    return steps.map(make_program)


def _play_uses(ctx: RankContext, program: Program) -> Play:
    """What the last cycle made may still be at hand; what came before it may not."""
    cycles: list[list[tuple[str, weakref.ref[object]]]] = []
    bases: list[Mapping[str, int]] = []
    for _ in range(REPEATS):
        cycles.append([born for step in program.steps for born in _use(ctx, step.op)])
        ctx.drain()
        yield NEXT
        gc.collect(1)
        bases.append(ctx.environment.leftovers())
    alive = [name for cycle in cycles[:-1] for name, reference in cycle if _is_alive(reference)]
    require("R1", not alive, f"{len(alive)} used up and still alive: {alive}")
    require_no_more("R1", bases[0], bases[-1], f"after {REPEATS} cycles")


def _use(ctx: RankContext, use: str) -> list[tuple[str, weakref.ref[object]]]:
    """Weak references to what one use makes, where its class allows any."""
    references = []
    for product in USES[use](ctx):
        with suppress(TypeError):
            references.append((type(product).__name__, weakref.ref(product)))
    return references


def _is_alive(reference: weakref.ref[object]) -> bool:
    """Whether it is still alive after garbage collection."""
    if reference() is not None:
        gc.collect()
    return reference() is not None


REPEATED_USE = (
    Property(
        name="dropped-objects-release-their-resources",
        family="resources",
        clauses=("R1",),
        claim="Events, stores, readers, leases, pages, locks and graphs go when they are dropped.",
        programs=_use_programs,
        play=_play_uses,
    ),
)


ALL_ROLES = tuple(role.value for role in Role)
THREAD_EXIT_TIMEOUT = 5.0
"""Seconds that a thread may take to end after `close`."""


def _close_programs(_: Traits) -> st.SearchStrategy[Program]:
    """`launch(role)` on a device of its own, which is then closed, once or twice."""
    launches = st.lists(st.sampled_from(ALL_ROLES), max_size=4)
    return st.builds(
        lambda roles, times: make_program(
            [*(Step("launch", (role,)) for role in roles), *[Step("close")] * times]
        ),
        launches,
        st.integers(1, 2),
    )


def _play_closed(ctx: RankContext, program: Program) -> Play:
    before = set(threading.enumerate())
    extra = ctx.backend.open(0)
    flag = ctx.full((1,), 0)
    for step in program.steps:
        if step.op == "launch":
            extra.stream(Role(str(step.args[0]))).launch(lambda: None)
        else:
            extra.close()
        yield NEXT
    for role in ALL_ROLES:
        stream = extra.stream(Role(role))
        for what, call in (
            ("launch", partial(stream.launch, partial(flag.fill_, 1))),
            ("record", partial(stream.record, extra.event())),
        ):
            refused = catch(call, StreamFailed)
            require("E5", refused, f"{what} on stream {role} of a device that was closed")
    require("E5", int(to_host(flag)) == 0, "a launch on a device that was closed has run")
    later = [thread for thread in threading.enumerate() if thread not in before]
    for thread in later:
        thread.join(THREAD_EXIT_TIMEOUT)
    alive = [thread.name for thread in later if thread.is_alive()]
    require("E5", not alive, f"threads that outlive the close of their device: {alive}")


def _description_programs(_: Traits) -> st.SearchStrategy[Program]:
    steps = st.sampled_from((Step("memory"), Step("topology")))
    return st.lists(steps, min_size=1, max_size=3).map(make_program)


def _play_descriptions(ctx: RankContext, program: Program) -> Play:
    accelerator = ctx.accelerator
    first = accelerator.topology()
    for step in program.steps:
        if step.op == "memory":
            _require_memory(accelerator.memory())
        else:
            _require_topology(accelerator.topology())
            require("B10", accelerator.topology() == first, "the topology is another than before")
        yield NEXT
    require("B10", first.index == 0, f"device 0 says that its index is {first.index}")
    name, backend = accelerator.name, ctx.backend.name
    is_named = name.startswith(backend) and name.endswith(str(first.index))
    require("B10", is_named, f"device 0 of {backend} is called {name!r}")


def _require_memory(memory: Memory) -> None:
    sound = memory.total > 0 and 0 <= memory.free <= memory.total
    require("B10", sound, f"{memory.free} bytes of {memory.total} are free")


def _require_topology(topology: Topology) -> None:
    require("B10", bool(topology.node), "the node has no name")
    require("B10", topology.numa >= -1, f"the NUMA node is {topology.numa}")


CLOSED_DEVICES = (
    Property(
        name="a-closed-device-refuses-launches",
        family=FAMILY,
        clauses=("E5",),
        claim="After close every launch is refused, no thread is left, and close may come again.",
        programs=_close_programs,
        play=_play_closed,
    ),
    Property(
        name="memory-and-topology-are-plausible",
        family=FAMILY,
        clauses=("B10",),
        claim="Memory and topology are within their bounds, and stay what they are.",
        programs=_description_programs,
        play=_play_descriptions,
    ),
)


PROPERTIES: tuple[Property, ...] = (
    *DEVICES,
    *CLOSED_DEVICES,
    *resources_signatures.PROPERTIES,
    *REPEATED_USE,
)
