"""Broken stand-ins for what torch gives for every accelerator, over the simulated NPU.

Each replaces one class or function of torch by one that a vendor could have got wrong. The adapter
must add nothing that hides it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from devices.conformance.breakage import Breakage, Patch, Sound
from torch import Tensor

from equipoise.backends.torch_accelerator import family

ACCELERATOR = family("npu")
SOUND = Sound(f"{__name__}:ACCELERATOR", communicator="")
undone = ExitStack()
"""Nothing: what is planted for one device is undone by the trial."""

EVENTS = "an-event-says-when-its-point-is-reached"
LAUNCHES = "launches-run-in-the-order-that-streams-and-events-give"
GRAPHS = "a-graph-runs-at-its-replays-only"
OWNERS = "slot-operations-own-their-buffers"
DEVICE = torch.device("npu", 0)
NPU = torch.get_device_module(DEVICE)
GENERIC_EVENT = torch.Event
"""Torch's own: within a block, `torch.Event` is the stand-in."""


@contextmanager
def _on_default_stream() -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(NPU.default_stream())
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _event_wait_does_nothing(patch: Patch) -> None:
    class Event(torch.Event):
        def wait(self, stream: Any = None) -> None:
            pass

    patch(torch, "Event", Event)


def _event_is_recorded_too_early(patch: Patch) -> None:
    class Event(torch.Event):
        def record(self, stream: Any = None) -> None:
            idle = torch.Stream(device=DEVICE)
            super().record(idle)
            idle.synchronize()

    patch(torch, "Event", Event)


def _event_query_is_always_true(patch: Patch) -> None:
    class Event(torch.Event):
        def query(self) -> bool:
            return True

    patch(torch, "Event", Event)


def _event_synchronize_returns_at_once(patch: Patch) -> None:
    class Event(torch.Event):
        def synchronize(self) -> None:
            pass

    patch(torch, "Event", Event)


def _event_wait_takes_a_later_recording(patch: Patch) -> None:
    waiting: list[tuple[torch.Stream, torch.Event]] = []
    healthy = torch.accelerator.set_stream

    class Event(torch.Event):
        def wait(self, stream: Any = None) -> None:
            waiting.append((stream, self))

    def set_stream(stream: torch.Stream) -> None:
        for waiter, event in [pair for pair in waiting if pair[0] == stream]:
            GENERIC_EVENT.wait(event, waiter)
            waiting.remove((waiter, event))
        healthy(stream)

    patch(torch, "Event", Event)
    patch(torch.accelerator, "set_stream", set_stream)


def _stream_query_is_always_true(patch: Patch) -> None:
    class Stream(torch.Stream):
        def query(self) -> bool:
            return True

    patch(torch, "Stream", Stream)


def _stream_synchronize_returns_at_once(patch: Patch) -> None:
    patch(NPU.Stream, "synchronize", lambda self: None)


def _programs_run_on_another_stream(patch: Patch) -> None:
    healthy = torch.accelerator.set_stream
    twins: dict[int, torch.Stream] = {}

    def set_stream(stream: torch.Stream) -> None:
        own = stream.stream_id
        if own and own not in twins:
            twins[own] = torch.Stream(device=DEVICE)
        healthy(twins.get(own, stream))

    patch(torch.accelerator, "set_stream", set_stream)


def _copies_run_on_the_default_stream(patch: Patch) -> None:
    healthy = torch.Tensor.copy_

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        with _on_default_stream():
            return healthy(self, source, non_blocking)

    patch(torch.Tensor, "copy_", copy_)


def _memory_info_is_nonsense(patch: Patch) -> None:
    patch(torch.accelerator, "get_memory_info", lambda index: (2 << 30, 1 << 30))


def _graph_runs_at_its_capture(patch: Patch) -> None:
    class Graph(torch.accelerator.Graph):
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

        def replay(self) -> None:
            pass

    patch(torch.accelerator, "Graph", Graph)


def _graph_replays_once(patch: Patch) -> None:
    class Graph(torch.accelerator.Graph):
        replayed = False

        def replay(self) -> None:
            if not self.replayed:
                super().replay()
            self.replayed = True

    patch(torch.accelerator, "Graph", Graph)


def _memory_is_reused_under_a_stream(patch: Patch) -> None:
    patch(torch.Tensor, "record_stream", lambda self, stream: None)


def _pinned_memory_is_pageable(patch: Patch) -> None:
    healthy = torch.empty

    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return healthy(*shape, **options)

    patch(torch, "empty", empty)


BREAKAGES = (
    Breakage(
        name="event_wait_does_nothing",
        broken="a stream that waits for an event goes on",
        property=LAUNCHES,
        plant=_event_wait_does_nothing,
    ),
    Breakage(
        name="event_is_recorded_too_early",
        broken="an event is recorded on a stream that has nothing to do",
        property=EVENTS,
        clause="O7",
        plant=_event_is_recorded_too_early,
    ),
    Breakage(
        name="event_query_is_always_true",
        broken="every event says that it was reached",
        property=EVENTS,
        clause="O7",
        plant=_event_query_is_always_true,
    ),
    Breakage(
        name="event_synchronize_returns_at_once",
        broken="the host does not wait for an event",
        property=EVENTS,
        clause="O7",
        plant=_event_synchronize_returns_at_once,
    ),
    Breakage(
        name="event_wait_takes_a_later_recording",
        broken="a wait refers to what the event is when the stream is used next",
        property=LAUNCHES,
        clause="O4",
        plant=_event_wait_takes_a_later_recording,
    ),
    Breakage(
        name="stream_query_is_always_true",
        broken="every stream says that it has drained",
        property=LAUNCHES,
        plant=_stream_query_is_always_true,
    ),
    Breakage(
        name="stream_synchronize_returns_at_once",
        broken="the host does not wait for the current stream",
        property="any-slot-mapping-is-committed-correctly",
        plant=_stream_synchronize_returns_at_once,
    ),
    Breakage(
        name="programs_run_on_another_stream",
        broken="another stream becomes the current one than was asked for",
        property=EVENTS,
        clause="O7",
        plant=_programs_run_on_another_stream,
    ),
    Breakage(
        name="copies_run_on_the_default_stream",
        broken="a copy runs on the default stream, whatever is current",
        property=LAUNCHES,
        plant=_copies_run_on_the_default_stream,
    ),
    Breakage(
        name="memory_info_is_nonsense",
        broken="more memory is free than there is",
        property="memory-and-topology-are-plausible",
        clause="B10",
        plant=_memory_info_is_nonsense,
    ),
    Breakage(
        name="graph_runs_at_its_capture",
        broken="what is captured runs, and a replay does nothing",
        property=GRAPHS,
        clause="B7",
        plant=_graph_runs_at_its_capture,
    ),
    Breakage(
        name="graph_replays_once",
        broken="only the first replay of a graph runs",
        property=GRAPHS,
        clause="B7",
        plant=_graph_replays_once,
    ),
    Breakage(
        name="memory_is_reused_under_a_stream",
        broken="the allocator forgets which streams use a tensor",
        property=OWNERS,
        clause="K1",
        plant=_memory_is_reused_under_a_stream,
    ),
    Breakage(
        name="pinned_memory_is_pageable",
        broken="memory that was to be page-locked is not",
        property="streams-are-cached-by-role-and-pinned-memory-is-not-shared",
        clause="B6",
        plant=_pinned_memory_is_pageable,
    ),
)
