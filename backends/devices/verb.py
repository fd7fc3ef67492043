"""What is issued to a stream, in a form in which a graph can issue it again."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from equipoise.hal.stream import Stream


def _nothing(_: Stream) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Verb:
    """Work for the device, and what the host does around it each time it is issued.

    A vendor graph keeps the work and nothing else: waits for events from outside, and recordings
    that somebody outside waits for, have no place in it. They belong to `around`, which a replay
    enters anew.

    Attributes:
        program: enqueues the work on the vendor's stream that it is given, which is current.
        guard: entered before any verb that is issued with it; raises what forbids the verb.
        around: entered around the work, on the stream that it is issued to.
    """

    program: Callable[[Any], object]
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    around: Callable[[Stream], AbstractContextManager[None]] = _nothing
