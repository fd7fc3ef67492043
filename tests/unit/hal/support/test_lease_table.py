"""Counts of leases: clause A11."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.watchdog import WATCHDOG
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import SlotLeased
from equipoise.hal.support.slot_access import LeaseTable

SLOTS = range(4)


def is_barred(leases: LeaseTable, slot: int) -> bool:
    try:
        with leases.exclude_leased([slot]):
            return False
    except SlotLeased:
        return True


@given(
    st.lists(st.lists(st.sampled_from(SLOTS), max_size=4), max_size=6),
    st.lists(st.integers(0, 5), max_size=12),
)
def test_slot_is_leased_until_last_release(
    requests: list[list[int]], release_order: list[int]
) -> None:
    leases = LeaseTable()
    lease_list = [leases.acquire(slots) for slots in requests]
    assert [lease.slots for lease in lease_list] == [tuple(slots) for slots in requests]
    released = set()
    for number in release_order:
        if number < len(lease_list):
            lease_list[number].release()
            released.add(number)
        leased_slots = {s for n, slots in enumerate(requests) if n not in released for s in slots}
        assert [is_barred(leases, slot) for slot in SLOTS] == [
            slot in leased_slots for slot in SLOTS
        ]


def test_slot_leased_error_names_every_slot() -> None:
    leases = LeaseTable()
    leases.acquire([3, 1])
    with (
        pytest.raises(SlotLeased, match=r"slot\(s\) 1, 3 are leased"),
        leases.exclude_leased([3, 0, 1]),
    ):
        pytest.fail("reached the block")


def test_lease_waits_while_operation_is_issued() -> None:
    leases, attempt, acquired = LeaseTable(), threading.Event(), threading.Event()

    def take() -> None:
        attempt.set()
        leases.acquire([0])
        acquired.set()

    with ThreadPoolExecutor(1) as pool:
        with leases.exclude_leased([0]):
            end = pool.submit(take)
            assert attempt.wait(WATCHDOG)
            assert not acquired.wait(0.05)
        end.result(WATCHDOG)
    assert is_barred(leases, 0)


def test_concurrent_release_of_lease_counts_once() -> None:
    leases, together = LeaseTable(), threading.Barrier(2)
    for _ in range(50):
        keep, twice = leases.acquire([0]), leases.acquire([0])

        def release(lease=twice) -> None:  # type: ignore[no-untyped-def]
            together.wait(WATCHDOG)
            lease.release()

        with ThreadPoolExecutor(2) as pool:
            for end in [pool.submit(release) for _ in range(2)]:
                end.result(WATCHDOG)
        assert is_barred(leases, 0)
        keep.release()
        assert not is_barred(leases, 0)
