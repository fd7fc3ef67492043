"""Every device that is here, opened for one test."""

from collections.abc import Iterator

import pytest
from helpers.harnesses.devices import KINDS, NETWORKS, Network, backend

from equipoise.backends.devices.accelerator import DeviceAccelerator


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    backend(found)
    return found


@pytest.fixture
def device(kind: str) -> Iterator[DeviceAccelerator]:
    made = backend(kind).open(0)
    assert isinstance(made, DeviceAccelerator)
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> Network:
    """Rank processes work with it; none of it is opened here."""
    found: str = request.param
    backend(found)
    return NETWORKS[found]
