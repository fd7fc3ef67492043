"""Streams and events: the order in which launches run on a device."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol, runtime_checkable


class Role(StrEnum):
    """What a stream is for; an accelerator has one stream per role."""

    COMPUTE = "compute"
    COPY = "copy"
    COMM = "comm"
    AUX = "aux"


@runtime_checkable
class Event(Protocol):
    """A point in a stream.

    Recording again moves the point; a wait refers to the point that was current when the wait was
    issued (clause O4).
    """

    def query(self) -> bool:
        """Whether the point has been reached; false before the first recording."""
        ...

    def synchronize(self, timeout: float) -> None:
        """Block the host until the point is reached.

        Raises:
            EventNotRecorded: nothing was ever recorded.
            StreamFailed: the recording stream failed before the point.
            StreamTimeout: not reached within `timeout` seconds.
        """
        ...


@runtime_checkable
class Stream(Protocol):
    """A queue of device work, first in first out (clause O1)."""

    @property
    def role(self) -> Role:
        """What the stream is for."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Make this the current stream of the calling thread, until the context is left.

        Contexts nest: what was current before is so again afterwards.
        Operations of a communicator that declares `stream_ordered` run after what was launched on
        the stream that is current when they are issued (clause X6).
        """
        ...

    def launch(self, program: Callable[[], object]) -> None:
        """Run `program` with this stream current.

        On a device the program's kernels are enqueued and the call returns; on the CPU the
        program itself is enqueued. A program launched from inside a program of the same stream
        runs at once, in place.

        On a device no other thread issues work to the accelerator while a program runs. So a
        program must not wait for another thread that issues work, nor, between a lock's `acquire`
        and its `release`, for the device: the writer's copies would be issued after the program.

        Raises:
            StreamFailed: an earlier program raised; on an adopted stream, this one did (clause E7).
        """
        ...

    def record(self, event: Event) -> None:
        """Move `event` to after everything launched so far."""
        ...

    def wait(self, event: Event) -> None:
        """Run everything launched from now on after `event`; the host does not block.

        Raises:
            EventNotRecorded: nothing was ever recorded into `event` (clause O3).
        """
        ...

    def synchronize(self, timeout: float) -> None:
        """Block the host until everything launched so far has run.

        Raises:
            StreamFailed: a program raised; the exception is the `__cause__`.
            StreamTimeout: not drained within `timeout` seconds.
        """
        ...
