"""Every device that is here, opened for one test."""

from collections.abc import Iterator
from os import environ

import pytest
from helpers.harnesses.devices import KINDS, NETWORKS, Network, backend

from equipoise.backends.cuda import cuda_runtime
from equipoise.backends.devices.accelerator import DeviceAccelerator

# Tests launch beside streams that they hold: a kernel that is loaded only then waits for them, and
# so does what shares a queue with them.
environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
cuda_runtime.request_queues()
LONGEST = ("test_suites.py", "test_engine_faults.py")
"""Files of which each takes minutes, so they begin first: whole files go to the processes of xdist
in this order, and one of these at the end would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the longest files to the front; the order is otherwise pytest's."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    backend(name)
    return name


@pytest.fixture
def device(kind: str) -> Iterator[DeviceAccelerator]:
    accelerator = backend(kind).open(0)
    assert isinstance(accelerator, DeviceAccelerator)
    yield accelerator
    accelerator.close()


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> Network:
    """Rank processes work with it; none of it is opened here."""
    name: str = request.param
    backend(name)
    return NETWORKS[name]
