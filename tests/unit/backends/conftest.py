"""Two ranks that meet over a store."""

from collections.abc import Iterator

import pytest

from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.common.tcp_store import StoreHost
from equipoise.hal.communicator import Rendezvous

DEADLINE = 20.0


@pytest.fixture
def planes() -> Iterator[list[StoreControlPlane]]:
    """The control planes of two ranks, and the launcher's store."""
    host = StoreHost()
    name, port = host.address
    control_planes = [
        StoreControlPlane(Rendezvous(rank=r, size=2, host=name, port=port, deadline=DEADLINE))
        for r in range(2)
    ]
    yield control_planes
    for plane in control_planes:
        plane.close()
    host.close()
