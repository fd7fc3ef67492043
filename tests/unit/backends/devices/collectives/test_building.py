"""How a channel is made while an earlier one, which was given up, is still being made."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.backends.cpu.control import StoreControlPlane
from equipoise.backends.devices.collectives.building import PENDING_CHANNELS, Builder, Plan
from equipoise.backends.devices.collectives.channel import Channel
from equipoise.backends.devices.collectives.library import Greeting, Membership
from equipoise.backends.devices.vendor import Device
from equipoise.hal.errors import CommunicatorFailed

DEADLINE = 20.0
SHORT = 0.2
DEVICE = Device(SimpleNamespace(settle_thread=lambda index: None), 0)
ENDED: Any = SimpleNamespace(ended=lambda: True, fault=lambda: "")


class SlowLibrary:
    """One whose channels named "slow" are made when the test says so."""

    name = "library"
    title = "Library"
    capabilities = SimpleNamespace(abort=False)

    def __init__(self) -> None:
        self.resumed = threading.Event()

    def takes(self, link: bool) -> int:
        return 0

    def meet(self, membership: Membership, *_: object) -> tuple[Any, Greeting]:
        if membership.name == "slow":
            assert self.resumed.wait(DEADLINE)
        group = SimpleNamespace(lane=None, close=lambda: None, closed=True)
        return group, Greeting(ENDED, (), torch.zeros(1, dtype=torch.int8))


@pytest.fixture
def library() -> Iterator[SlowLibrary]:
    library = SlowLibrary()
    yield library
    library.resumed.set()
    expiry = time.monotonic() + DEADLINE
    while PENDING_CHANNELS.names() and time.monotonic() < expiry:
        time.sleep(0.001)


@pytest.fixture
def builder(planes: list[StoreControlPlane], library: SlowLibrary) -> Builder:
    """Rank 0's."""
    anything: Any = library
    return Builder(anything, planes[0])


def make(builder: Builder, name: str, *others: int, seconds: float = DEADLINE) -> Channel:
    """A channel of rank 0 and others."""
    greet: Any = None
    plan = Plan(Membership(name, (0, *others), 0, link=False), greet, DEVICE)
    return builder.build(plan, builder.patience(time.monotonic() + seconds))


def make_slow_with_lost_rank(builder: Builder, planes: list[StoreControlPlane]) -> None:
    """Rank 1 is lost after it has come; rank 0 gives up at its deadline."""
    for word in ("here", "ready"):
        planes[1].cast(f"library/slow/{word}", b"")
    with pytest.raises(CommunicatorFailed, match="slow: Library did not make it in time"):
        make(builder, "slow", 1, seconds=SHORT)
    assert PENDING_CHANNELS.names() == ("slow",)
    planes[1].leave("fell over")


def test_channel_is_made_only_after_one_that_was_given_up(
    builder: Builder, library: SlowLibrary
) -> None:
    with pytest.raises(CommunicatorFailed, match="slow: Library did not make it in time"):
        make(builder, "slow", seconds=SHORT)
    with pytest.raises(CommunicatorFailed, match="next: Library is still making slow"):
        make(builder, "next", seconds=SHORT)
    library.resumed.set()
    assert make(builder, "last").membership.name == "last"


def test_channel_with_lost_rank_does_not_block_others(
    builder: Builder, planes: list[StoreControlPlane]
) -> None:
    make_slow_with_lost_rank(builder, planes)
    assert make(builder, "next").membership.name == "next"


def test_channel_with_lost_rank_blocks_no_other_fabric(
    builder: Builder, planes: list[StoreControlPlane]
) -> None:
    make_slow_with_lost_rank(builder, planes)
    builder.give_up()
    assert PENDING_CHANNELS.names() == ()
