"""What a vendor's binding brings: torch.cuda and torch.npu are two of a kind, up to this."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class DeviceRuntime(Protocol):
    """A binding. Its streams, events and graphs are typed `Any`: no vendor is installed everywhere.

    Streams have `query`, `synchronize`, `stream_id`; events `record(stream)`, `wait(stream)`,
    `query`; graphs `replay`. All of them report what went wrong on the device as a RuntimeError.
    A module may be one.
    """

    @property
    def kind(self) -> str:
        """The type of its torch devices."""
        ...

    def settle_thread(self, index: int) -> None:
        """Make device `index` the calling thread's."""
        ...

    def current(self, stream: Any) -> AbstractContextManager[None]:
        """Make a stream, and its device, the calling thread's current one for a block."""
        ...

    def current_stream(self, index: int) -> Any:
        """The calling thread's current stream of that device."""
        ...

    def kept_stream(self, index: int, use: str) -> Any:
        """The stream of this process for a use, made once: pools begin anew behind their last."""
        ...

    def event(self) -> Any:
        """A fresh event."""
        ...

    def captured(self, stream: Any) -> bool:
        """Whether a stream is being captured, by whomever."""
        ...

    def uncapturable(self) -> str:
        """Why no graph can be captured; nothing where it can."""
        ...

    def begin_capture(self) -> Any:
        """A graph that captures the current stream from now on.

        Only the calling thread is forbidden what a capture forbids: others go on looking at events.
        """
        ...

    def end_capture(self, graph: Any) -> None:
        """Its end, on the same stream."""
        ...

    def unrestricted(self) -> AbstractContextManager[None]:
        """Let the calling thread take page-locked memory and ask streams for a block, also while it
        or another thread captures."""
        ...

    def free_memory(self, index: int) -> tuple[int, int]:
        """Bytes of the device: free, and all."""
        ...


def first_line(error: BaseException) -> str:
    """Of what a vendor raised, often with a trace of its own behind; its type where it is mute."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True)
class Device:
    """One device of a vendor's.

    Attributes:
        runtime: its binding.
        index: which.
    """

    runtime: DeviceRuntime
    index: int

    @property
    def torch(self) -> torch.device:
        """As torch names it."""
        return torch.device(self.runtime.kind, self.index)

    def settle(self) -> None:
        """Make it the calling thread's."""
        self.runtime.settle_thread(self.index)

    def kept_stream(self, use: str) -> Any:
        """The vendor's stream of this process for a use."""
        return self.runtime.kept_stream(self.index, use)
