"""The host pool: clause A13."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.cpu import BACKEND
from equipoise.backends.cpu.accelerator import CpuAccelerator
from equipoise.hal.errors import EventNotRecorded, PoolExhausted, SlotError, StreamFailed
from equipoise.hal.stream import Event, Role
from equipoise.hal.support.page_pool import PagePool


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    accelerator = BACKEND.open(0)
    yield accelerator
    accelerator.close()


def behind(cpu: CpuAccelerator, gate: threading.Event) -> Event:
    """An event of the copy stream that is reached when the gate opens."""
    event, copy = cpu.event(), cpu.stream(Role.COPY)
    copy.launch(lambda: gate.wait(WATCHDOG))
    copy.record(event)
    return event


def test_pool_pages_are_separate_and_of_requested_size(cpu: CpuAccelerator) -> None:
    pool = cpu.host_pool(16, 3)
    pages = [pool.take(WATCHDOG) for _ in range(3)]
    for number, page in enumerate(pages):
        page.data.fill_(number)
    assert pool.page_bytes == 16
    assert [page.data.tolist() for page in pages] == [[number] * 16 for number in range(3)]
    assert {page.data.dtype for page in pages} == {torch.uint8}


def test_pool_take_times_out_without_free_page(cpu: CpuAccelerator) -> None:
    pool = cpu.host_pool(4, 1)
    page = pool.take(WATCHDOG)
    with pytest.raises(PoolExhausted, match=r"within 0\.02 s"):
        pool.take(0.02)
    page.give_back(None)
    assert pool.take(0.0).data.data_ptr() == page.data.data_ptr()


def test_page_returns_only_after_copy_that_reads_it(cpu: CpuAccelerator) -> None:
    pool, gate, read = cpu.host_pool(4, 1), threading.Event(), []
    page = pool.take(WATCHDOG)
    page.data.fill_(1)
    copy = cpu.stream(Role.COPY)
    event = cpu.event()
    copy.launch(lambda: gate.wait(WATCHDOG))
    copy.launch(lambda: read.append(page.data.tolist()))
    copy.record(event)
    page.give_back(event)
    with pytest.raises(PoolExhausted):
        pool.take(0.03)
    with ThreadPoolExecutor(1) as threads:
        page_future = threads.submit(pool.take, WATCHDOG)
        gate.set()
        page_future.result(WATCHDOG).data.fill_(2)
    copy.synchronize(WATCHDOG)
    assert read == [[1] * 4]


def test_pool_prefers_free_page_over_one_being_read(
    cpu: CpuAccelerator,
) -> None:
    pool, gate = cpu.host_pool(4, 2), threading.Event()
    read, idle = pool.take(WATCHDOG), pool.take(WATCHDOG)
    read.give_back(behind(cpu, gate))
    with ThreadPoolExecutor(1) as threads:
        page_future = threads.submit(pool.take, WATCHDOG)
        idle.give_back(None)
        assert page_future.result(WATCHDOG).data.data_ptr() == idle.data.data_ptr()
    gate.set()


def test_pool_take_is_woken_by_returned_page(cpu: CpuAccelerator) -> None:
    pool = cpu.host_pool(4, 1)
    page, take_event = pool.take(WATCHDOG), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        page_future = threads.submit(pool.take, WATCHDOG)
        page_future.add_done_callback(lambda _: take_event.set())
        assert not take_event.wait(0.02)
        page.give_back(None)
        assert take_event.wait(WATCHDOG)
        assert page_future.result(WATCHDOG).data.data_ptr() == page.data.data_ptr()


def test_page_refuses_second_give_back(cpu: CpuAccelerator) -> None:
    pool = cpu.host_pool(4, 1)
    page = pool.take(WATCHDOG)
    page.give_back(None)
    with pytest.raises(SlotError, match="given back twice"):
        page.give_back(None)
    again = pool.take(WATCHDOG)
    with pytest.raises(SlotError):
        page.give_back(None)
    with pytest.raises(PoolExhausted):
        pool.take(0.0)
    again.give_back(None)


def test_page_give_back_refuses_unrecorded_event(
    cpu: CpuAccelerator,
) -> None:
    pool = cpu.host_pool(4, 1)
    page = pool.take(WATCHDOG)
    with pytest.raises(EventNotRecorded):
        page.give_back(cpu.event())
    page.give_back(None)


def test_page_returns_after_failed_copy(cpu: CpuAccelerator) -> None:
    pool, event, copy = cpu.host_pool(4, 1), cpu.event(), cpu.stream(Role.COPY)
    page = pool.take(WATCHDOG)
    gate = threading.Event()
    copy.launch(lambda: gate.wait(WATCHDOG))
    copy.launch(lambda: 1 / 0)
    copy.record(event)
    page.give_back(event)
    with ThreadPoolExecutor(1) as threads:
        page_future = threads.submit(pool.take, WATCHDOG)
        gate.set()
        assert page_future.result(WATCHDOG).data.data_ptr() == page.data.data_ptr()
    with pytest.raises(StreamFailed):
        copy.synchronize(WATCHDOG)


def test_concurrent_takers_never_share_a_page(cpu: CpuAccelerator) -> None:
    pool, in_use, clashes = cpu.host_pool(4, 2), set[int](), list[int]()
    guard, copy = threading.Lock(), cpu.stream(Role.COPY)

    def take_often() -> None:
        for _ in range(40):
            page = pool.take(WATCHDOG)
            where = page.data.data_ptr()
            with guard:
                clashes.extend({where} & in_use)
                in_use.add(where)
            event = cpu.event()

            def leave(where: int = where) -> None:
                with guard:
                    in_use.discard(where)

            copy.launch(leave)
            copy.record(event)
            page.give_back(event)

    with ThreadPoolExecutor(4) as threads:
        for end in [threads.submit(take_often) for _ in range(4)]:
            end.result(WATCHDOG)
    assert clashes == []


@pytest.mark.parametrize(("page_bytes", "pages"), [(0, 1), (1, 0), (-1, 1)])
def test_pool_refuses_empty_size(page_bytes: int, pages: int) -> None:
    with pytest.raises(SlotError, match="a pool needs pages"):
        PagePool(lambda n: torch.empty(n, dtype=torch.uint8), page_bytes, pages)
