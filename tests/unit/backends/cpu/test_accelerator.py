"""The CPU as an accelerator: clauses B1, E5."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.backends.cpu.stream import CpuStream, CpuStreamOp
from equipoise.hal.capabilities import Available
from equipoise.hal.errors import BackendUnavailable
from equipoise.hal.stream import Role


@pytest.fixture
def cpu() -> CpuAccelerator:
    return BACKEND.open(0)


def test_probe_reports_cores() -> None:
    availability = BACKEND.probe()
    assert isinstance(availability, Available)
    assert "cores" in availability.detail


@pytest.mark.parametrize("index", [-1, 1, 7])
def test_open_refuses_any_index_but_zero(index: int) -> None:
    with pytest.raises(BackendUnavailable, match="device 0 only"):
        BACKEND.open(index)


def test_issue_blocks_launches_on_every_stream(cpu: CpuAccelerator) -> None:
    """Else a launch could come between a commit's two waits on a reader's stream (clause V4)."""
    issue_began, resume_event, launch_ended = (
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )

    def issue(_: CpuStream) -> None:
        issue_began.set()
        resume_event.wait(WATCHDOG)

    def launch() -> None:
        cpu.stream(Role.COMPUTE).launch(lambda: None)
        launch_ended.set()

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(cpu.stream(Role.COPY).issue, CpuStreamOp(issue))]
        assert issue_began.wait(WATCHDOG)
        ends.append(pool.submit(launch))
        assert not launch_ended.wait(0.05)
        resume_event.set()
        for end in ends:
            end.result(WATCHDOG)
    assert launch_ended.is_set()
    cpu.close()


def test_accelerators_share_no_stream() -> None:
    first, second = BACKEND.open(0), BACKEND.open(0)
    assert first.stream(Role.COMPUTE) is not second.stream(Role.COMPUTE)


def test_accelerator_reports_topology_and_memory(cpu: CpuAccelerator) -> None:
    assert cpu.topology().index == 0
    assert cpu.topology().node
    assert 0 < cpu.memory().free <= cpu.memory().total


def test_close_ends_every_thread_and_is_idempotent(cpu: CpuAccelerator) -> None:
    before = threading.active_count()
    for role in Role:
        cpu.stream(role).launch(lambda: None)
    cpu.close()
    cpu.close()
    assert threading.active_count() == before
