"""Who has which stream of HCCL's pool: no two communicators wait behind each other (P1, X3)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import pytest

from equipoise.backends.ascend.hccl_streams import HcclStreamPool
from equipoise.hal.errors import CommunicatorFailed

POOL = 5


@dataclass(frozen=True)
class Stream:
    stream_id: int


class Vendor:
    """Hands out the streams of its pool in turn, whoever asks."""

    def __init__(self) -> None:
        self._pool: Iterator[int] = cycle(range(100, 100 + POOL))

    def draw(self) -> Stream:
        return Stream(next(self._pool))


def test_hccl_stream_pool_reserve_next_predicts_vendor_stream() -> None:
    vendor = Vendor()
    account = HcclStreamPool(vendor.draw)
    for number in range(POOL - 1):
        reservation = account.reserve_next()
        assert account.assign(vendor.draw().stream_id, f"c{number}") == reservation


def test_hccl_stream_pool_gives_each_communicator_its_own_stream() -> None:
    vendor = Vendor()
    account = HcclStreamPool(vendor.draw)
    stream_ids = {_take(account, vendor, f"c{n}").stream_id for n in range(POOL - 1)}
    assert len(stream_ids | {account.release_stream.stream_id}) == POOL


def test_hccl_stream_pool_reuses_only_released_stream() -> None:
    vendor = Vendor()
    account = HcclStreamPool(vendor.draw)
    lanes = [_take(account, vendor, f"c{n}") for n in range(POOL - 1)]
    account.release(lanes[1])
    assert _take(account, vendor, "new").stream_id == lanes[1].stream_id


def test_exhausted_hccl_stream_pool_error_names_owners() -> None:
    vendor = Vendor()
    account = HcclStreamPool(vendor.draw)
    for number in range(POOL - 1):
        _take(account, vendor, f"c{number}")
    with pytest.raises(CommunicatorFailed, match=r"has 5, held by c0, c1, c2, c3, the release"):
        account.reserve_next()


def test_hccl_stream_pool_tolerates_draws_of_an_engine() -> None:
    vendor = Vendor()
    account = HcclStreamPool(vendor.draw)
    first = _take(account, vendor, "first")
    for _ in range(POOL - 1):
        vendor.draw()
    second = _take(account, vendor, "second")
    assert second.stream_id not in (first.stream_id, account.release_stream.stream_id)


def test_hccl_stream_pool_detects_communicator_on_taken_stream() -> None:
    vendor = Vendor()
    account = HcclStreamPool(vendor.draw)
    first = _take(account, vendor, "first")
    with pytest.raises(CommunicatorFailed, match="HCCL runs second on the stream of first"):
        account.assign(first.stream_id, "second")


def test_hccl_stream_pool_detects_stream_of_another_pool() -> None:
    with pytest.raises(CommunicatorFailed, match="stream 7, which is not of its pool"):
        HcclStreamPool(Vendor().draw).assign(7, "c")


def _take(account: HcclStreamPool, vendor: Vendor, holder: str) -> Stream:
    account.reserve_next()
    number = vendor.draw().stream_id
    account.assign(number, holder)
    return Stream(number)
