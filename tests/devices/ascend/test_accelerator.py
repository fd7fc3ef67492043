"""The opened NPU: clauses A13, B1, B2, B4, B6, E5, R2."""

import subprocess
import sys
import threading

import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.ascend import BACKEND, npu_runtime
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.hal.capabilities import Available, SlotFormat
from equipoise.hal.errors import BackendUnavailable, LockPoisoned, Unsupported
from equipoise.hal.stream import Role


def test_probe_reports_torch_npu_version() -> None:
    answer = BACKEND.probe()
    assert isinstance(answer, Available)
    assert "torch_npu 2." in answer.detail
    assert BACKEND.devices() >= 1


def test_open_refuses_missing_device_index() -> None:
    for index in (-1, BACKEND.devices()):
        with pytest.raises(BackendUnavailable, match="no device"):
            BACKEND.open(index)


def test_declared_capabilities_match_device(npu: AscendAccelerator) -> None:
    capabilities = BACKEND.capabilities
    assert (capabilities.streams, capabilities.stream_lock, capabilities.graph_capture) == (
        len(Role),
        True,
        True,
    )
    assert capabilities.copy_independent_of_launch
    assert capabilities.pinned_memory
    assert npu.pinned(3).is_pinned()
    assert capabilities.slot_formats == frozenset(SlotFormat)
    assert not npu.kernels.levels_on_device


def test_stream_lock_unsupported_without_value_wait(
    npu: AscendAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu_runtime, "value_waits", lambda: False)
    assert not BACKEND.capabilities.stream_lock
    assert not BACKEND.capabilities.copy_independent_of_launch
    with pytest.raises(Unsupported, match="aclrtValueWait"):
        npu.stream_lock(WATCHDOG)


def test_accelerator_reports_topology_and_free_memory(npu: AscendAccelerator) -> None:
    assert npu.name == "ascend:0"
    assert npu.device == torch.device("npu", 0)
    assert npu.topology().index == 0
    before = npu.memory()
    assert 0 < before.free <= before.total
    block = torch.empty(64 << 20, dtype=torch.uint8, device=npu.device)
    assert npu.memory().free <= before.free - block.nbytes


def test_host_pool_page_is_pinned_and_waits_for_its_copy(
    npu: AscendAccelerator,
) -> None:
    pool, stream, lock = npu.host_pool(64, 1), npu.stream(Role.COPY), npu.stream_lock(WATCHDOG)
    page, event = pool.take(WATCHDOG), npu.event()
    assert page.data.is_pinned()
    target = torch.empty(64, dtype=torch.uint8, device=npu.device)
    page.data.fill_(5)
    lock.acquire(stream)
    stream.launch(lambda: target.copy_(page.data, non_blocking=True))
    stream.record(event)
    page.give_back(event)
    refills = list[object]()
    taker = threading.Thread(target=lambda: refills.append(pool.take(WATCHDOG).data.fill_(6)))
    taker.start()
    taker.join(0.1)
    assert not refills
    lock.signal(0)
    taker.join(WATCHDOG)
    stream.synchronize(WATCHDOG)
    assert set(target.tolist()) == {5}


def test_close_releases_waiting_stream_and_poisons_lock() -> None:
    accelerator = BACKEND.open(0)
    lock = accelerator.stream_lock(WATCHDOG)
    lock.acquire(accelerator.stream(Role.COMPUTE))
    accelerator.close()
    accelerator.close()
    with pytest.raises(LockPoisoned):
        lock.signal(0)


def test_process_exits_with_stream_waiting_for_lock() -> None:
    """torch_npu waits for the device at the end, and would wait for ever."""
    script = """
from equipoise.backends.ascend import BACKEND
from equipoise.hal.stream import Role
opened = BACKEND.open(0)
opened.stream_lock(600.0).acquire(opened.stream(Role.COMPUTE))
print("left", flush=True)
"""
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert completed.stdout.strip() == "left"
    assert completed.returncode == 0, completed.stderr
