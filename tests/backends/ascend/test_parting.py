"""Whose turn it is to make a communicator, how it is introduced, and how it is given back."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from equipoise.backends.ascend.exchange import round_of
from equipoise.backends.ascend.group import Membership
from equipoise.backends.ascend.introduction import LAST, Introduction
from equipoise.backends.ascend.parting import Partings
from equipoise.backends.ascend.stranded import STRANDED
from equipoise.backends.ascend.turn import Turn
from equipoise.backends.cpu.control import StoreControlPlane
from equipoise.backends.cpu.store import StoreHost
from equipoise.backends.devices.patience import Patience
from equipoise.hal.communicator import Exchange, Parcel, Rendezvous
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed

DEADLINE = 20.0
SHORT = 0.05
Planes = list[StoreControlPlane]


@pytest.fixture
def planes() -> Iterator[Planes]:
    """The control planes of two ranks, and the launcher's store."""
    host = StoreHost()
    name, port = host.address
    made = [
        StoreControlPlane(Rendezvous(rank=r, size=2, host=name, port=port, deadline=DEADLINE))
        for r in range(2)
    ]
    yield made
    for plane in made:
        plane.close()
    host.close()


def patience(seconds: float = DEADLINE) -> Patience:
    return Patience(time.monotonic() + seconds, threading.Event())


def test_turns_follow_each_other(planes: Planes) -> None:
    order: list[str] = []
    with Turn(planes[0], "first", patience()):

        def next_one() -> None:
            with Turn(planes[1], "second", patience()):
                order.append("second")

        waiting = threading.Thread(target=next_one)
        waiting.start()
        order.append("first")
    waiting.join(DEADLINE)
    assert order == ["first", "second"]


def test_a_turn_that_does_not_come_in_time_names_who_has_it(planes: Planes) -> None:
    with (
        Turn(planes[0], "model/0/0-1", patience()),
        pytest.raises(CommunicatorFailed, match="rank 0 model/0/0-1"),
        Turn(planes[1], "other", patience(SHORT)),
    ):
        pass


def test_a_rank_that_was_lost_has_no_turn_any_more(planes: Planes) -> None:
    Turn(planes[0], "mine", patience()).__enter__()
    planes[0].leave("fell over")
    had = []
    with Turn(planes[1], "next", patience()):
        had.append("next")
    assert had == ["next"]


def test_whoever_gives_up_waits_no_longer(planes: Planes) -> None:
    given_up = threading.Event()
    given_up.set()
    impatient = Patience(time.monotonic() + DEADLINE, given_up)
    with (
        Turn(planes[0], "mine", patience()),
        pytest.raises(CommunicatorFailed),
        Turn(planes[1], "next", impatient),
    ):
        pass


def test_an_introduction_carries_words_from_the_first_rank(planes: Planes) -> None:
    speaker, hearer = (Introduction(plane, "q", (0, 1), patience()) for plane in planes)
    speaker.set("0", b"\0where\xff")
    assert hearer.get("0") == b"\0where\xff"


def test_the_last_word_ends_when_the_others_have_heard_it(planes: Planes) -> None:
    speaker, hearer = (Introduction(plane, "q", (0, 1), patience()) for plane in planes)
    heard: list[bytes] = []
    listening = threading.Thread(target=lambda: heard.append(hearer.get(LAST)))
    listening.start()
    speaker.set(LAST, b"2.13")
    listening.join(DEADLINE)
    assert heard == [b"2.13"]


def test_nobody_enters_a_meeting_to_which_nobody_else_comes(planes: Planes) -> None:
    with pytest.raises(BallotIncomplete) as raised:
        Introduction(planes[0], "q", (0, 1), patience(SHORT)).set(LAST, b"2.13")
    assert raised.value.missing == (1,)


def test_an_introduction_that_has_taken_place_is_forgotten(planes: Planes) -> None:
    made = Introduction(planes[0], "q", (0,), patience())
    made.forget()
    with pytest.raises(CommunicatorFailed, match="after the introduction"):
        made.get("0")


class Channel:
    """A channel that is idle when the test says so."""

    def __init__(self, name: str, idle: bool) -> None:
        self.membership = Membership(name, (0, 1), 0, 1)
        self.idle = idle
        self.closed = False

    def reap(self) -> bool:
        return self.idle

    def close(self) -> None:
        self.closed = True


def test_a_channel_is_given_back_when_every_member_is_through_with_it(planes: Planes) -> None:
    mine, theirs = (Partings(plane) for plane in planes)
    here, there = Channel("c", idle=True), Channel("c", idle=False)
    mine.add(here)  # type: ignore[arg-type]
    theirs.add(there)  # type: ignore[arg-type]
    assert mine.tick()
    assert theirs.tick()
    there.idle = True
    assert not theirs.tick()
    assert not mine.tick()
    assert here.closed
    assert there.closed


def test_what_is_not_idle_when_the_fabric_closes_is_kept_until_it_is(planes: Planes) -> None:
    partings, channel = Partings(planes[0]), Channel("stuck", idle=False)
    partings.add(channel)  # type: ignore[arg-type]
    partings.finish(lambda: SHORT)
    assert "stuck" in STRANDED.names()
    STRANDED.sweep()
    assert not channel.closed
    channel.idle = True
    STRANDED.sweep()
    assert channel.closed
    assert "stuck" not in STRANDED.names()


def test_without_a_store_a_channel_is_kept(planes: Planes) -> None:
    partings, channel = Partings(planes[0]), Channel("alone", idle=True)
    partings.add(channel)  # type: ignore[arg-type]
    with closing(planes[0]):
        planes[0].close()
    assert not partings.tick()
    assert not channel.closed
    STRANDED.sweep()


def test_a_round_is_one_call_with_a_block_for_each_direction_and_pair() -> None:
    blobs = [torch.full((n,), n, dtype=torch.uint8) for n in (3, 0, 2, 1)]
    planned = round_of(
        Exchange(
            sends=(Parcel(2, blobs[0]), Parcel(3, blobs[1])),
            receives=(Parcel(3, blobs[2]), Parcel(1, blobs[3])),
        )
    )
    assert planned.ways == ("irecv", "irecv", "isend")
    assert planned.peers == (1, 3, 2)
    assert [blob.numel() for blob in planned.blobs] == [1, 2, 3]
    assert {blob.dtype for blob in planned.blobs} == {torch.int8}
