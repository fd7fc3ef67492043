"""Every device that is here, opened for one test."""

from collections.abc import Iterator

import pytest
from support.devices import KINDS, backend

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
