"""The loopback interface of this machine as a link; as it is, or with a delay in the HAL."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from link_place import Asked, Place

from equipoise.hal import registry

INTERFACE = "lo"


@dataclass(frozen=True)
class Loopback:
    """All ranks in the launcher's own network namespace. See `Link`."""

    name: str
    store: tuple[str, int]
    delay: Asked | None = None

    @property
    def asked(self) -> Asked | None:
        """See `Link`."""
        return self.delay

    def place(self, rank: int) -> Place:
        """See `Link`: where the launcher is."""
        return Place(environment={"GLOO_SOCKET_IFNAME": INTERFACE})


@contextmanager
def loopback() -> Iterator[Loopback]:
    """What this machine has."""
    host = registry.communicator("gloo").host()
    try:
        yield Loopback("loopback", host.address)
    finally:
        host.close()


@contextmanager
def delayed(asked: Asked) -> Iterator[Loopback]:
    """Where no other link can be made: every message is held back by the communicator."""
    host = registry.communicator("gloo").host()
    try:
        yield Loopback("delay in the HAL", host.address, asked)
    finally:
        host.close()
