"""Waits of the adapter over torch's generic streams and events, for a stream that is held.

Torch has nothing for every device that holds a stream, so the conformance suite does not judge
these waits (E11); an external event of torch_npu holds one here.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.harnesses.devices import backend
from helpers.watchdog import WATCHDOG

from equipoise.backends.torch_accelerator import family
from equipoise.backends.torch_accelerator.accelerator import TorchAccelerator
from equipoise.hal.errors import PoolExhausted, StreamFailed, StreamTimeout
from equipoise.hal.stream import Role

SHORT = 0.05


@pytest.fixture
def device() -> Iterator[TorchAccelerator]:
    backend("ascend")
    accelerator = family("npu").open(0)
    yield accelerator
    accelerator.close()


@pytest.fixture
def release(device: TorchAccelerator) -> Callable[[], None]:
    """Holds the copy stream until it is called."""
    npu, stream = torch.get_device_module(device.device), device.stream(Role.COPY).native
    external = npu.ExternalEvent()
    names = ("stream_id", "device_index", "device_type")
    external.wait(npu.Stream(**{name: getattr(stream, name) for name in names}))
    return lambda: external.record(npu.Stream())


def test_wait_for_held_stream_times_out(
    device: TorchAccelerator, release: Callable[[], None]
) -> None:
    stream, event, pool = device.stream(Role.COPY), device.event(), device.host_pool(8, 1)
    stream.record(event)
    pool.take(WATCHDOG).give_back(event)
    for wait in (stream.synchronize, event.synchronize, device.synchronize):
        with pytest.raises(StreamTimeout):
            wait(SHORT)
    with pytest.raises(PoolExhausted):
        pool.take(SHORT)
    assert not event.query()
    release()
    for wait in (event.synchronize, stream.synchronize, device.synchronize):
        wait(WATCHDOG)
    event.synchronize(0.0)
    pool.take(WATCHDOG)


def test_waiting_stream_fails_with_recording_stream(device: TorchAccelerator) -> None:
    stream, other, event = device.stream(Role.COPY), device.stream(Role.AUX), device.event()
    stream.launch(lambda: 1 // 0)
    with pytest.raises(StreamFailed):
        stream.record(event)
    with pytest.raises(StreamFailed) as failure:
        other.wait(event)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)
