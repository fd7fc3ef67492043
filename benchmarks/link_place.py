"""What a link between ranks is to the benchmark of stages: where ranks run, and where they meet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Asked:
    """What a link is asked to be; what it is, is measured.

    Attributes:
        latency: seconds, one way, of a message without bytes.
        rate: bytes per second that leave a rank; directions do not share it.
    """

    latency: float
    rate: float

    def seconds(self, nbytes: int) -> float:
        """That a message of so many bytes takes on an idle link."""
        return self.latency + nbytes / self.rate


@dataclass(frozen=True)
class Place:
    """How a rank's process is started, so that it finds itself at its end of the link.

    Attributes:
        prefix: of the command.
        environment: variables beside those of the launcher.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Link(Protocol):
    """A link that is there, for one crew: ranks meet at its store once.

    Whoever made it takes it away again.
    """

    @property
    def name(self) -> str:
        """For tables."""
        ...

    @property
    def asked(self) -> Asked | None:
        """What it was asked to be; None: whatever this machine has."""
        ...

    @property
    def delay(self) -> Asked | None:
        """What the ranks themselves have to add: a delay in the HAL; else None."""
        ...

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the rendezvous, as a rank reaches it."""
        ...

    def place(self, rank: int) -> Place:
        """Where this rank runs."""
        ...
