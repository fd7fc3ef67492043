"""Who has which stream of HCCL's pool: no two communicators wait behind each other (P1, X3)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import pytest

from equipoise.backends.ascend.lanes import Lanes
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


def test_the_stream_that_was_aimed_at_is_the_next_that_the_vendor_hands_out() -> None:
    vendor = Vendor()
    account = Lanes(vendor.draw)
    for number in range(POOL - 1):
        aimed = account.aim()
        assert account.take(vendor.draw().stream_id, f"c{number}") == aimed


def test_every_communicator_has_a_stream_of_its_own_and_so_has_the_bell() -> None:
    vendor = Vendor()
    account = Lanes(vendor.draw)
    taken = {_take(account, vendor, f"c{n}").stream_id for n in range(POOL - 1)}
    assert len(taken | {account.bell.stream_id}) == POOL


def test_what_was_given_back_is_handed_out_again_and_nothing_else() -> None:
    vendor = Vendor()
    account = Lanes(vendor.draw)
    lanes = [_take(account, vendor, f"c{n}") for n in range(POOL - 1)]
    account.give(lanes[1])
    assert _take(account, vendor, "new").stream_id == lanes[1].stream_id


def test_when_all_are_taken_the_error_names_the_holders() -> None:
    vendor = Vendor()
    account = Lanes(vendor.draw)
    for number in range(POOL - 1):
        _take(account, vendor, f"c{number}")
    with pytest.raises(CommunicatorFailed, match=r"the pool has 5, held by c0, c1, c2, c3, the b"):
        account.aim()


def test_somebody_else_may_draw_between_two_communicators() -> None:
    vendor = Vendor()
    account = Lanes(vendor.draw)
    first = _take(account, vendor, "first")
    for _ in range(POOL - 1):
        vendor.draw()
    second = _take(account, vendor, "second")
    assert second.stream_id not in (first.stream_id, account.bell.stream_id)


def test_a_stream_that_was_drawn_by_somebody_else_in_between_is_noticed() -> None:
    vendor = Vendor()
    account = Lanes(vendor.draw)
    first = _take(account, vendor, "first")
    with pytest.raises(CommunicatorFailed, match="HCCL runs second on the stream of first"):
        account.take(first.stream_id, "second")


def test_a_stream_of_another_pool_is_noticed() -> None:
    with pytest.raises(CommunicatorFailed, match="stream 7, which is not of its pool"):
        Lanes(Vendor().draw).take(7, "c")


def _take(account: Lanes, vendor: Vendor, holder: str) -> Stream:
    account.aim()
    number = vendor.draw().stream_id
    account.take(number, holder)
    return Stream(number)
