"""Makes HCCL's communicators: bounded, one at a time in the run, each on a stream of its own."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from equipoise.backends.ascend import native
from equipoise.backends.ascend.channel import Berth, Channel
from equipoise.backends.ascend.flight import Fate
from equipoise.backends.ascend.greeting import Greeting
from equipoise.backends.ascend.group import Group, Membership, high_priority, make_group
from equipoise.backends.ascend.introduction import Introduction, collected
from equipoise.backends.ascend.lanes import lanes
from equipoise.backends.ascend.stranded import STRANDED
from equipoise.backends.ascend.turn import Turn
from equipoise.backends.cpu.control import StoreControlPlane
from equipoise.backends.devices.patience import Patience
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, ControlError

PAUSE = 0.0005
"""Seconds between two looks at whether the greeting has ended."""
Greet = Callable[[Group, int, int, Any], Greeting]
"""The first operations of a group, given this rank, the size and the device."""


@dataclass(frozen=True)
class Plan:
    """What is to be made.

    Attributes:
        membership: of the process group.
        greet: its first operations.
        index: of the device.
    """

    membership: Membership
    greet: Greet
    index: int


class Builder:
    """Makes channels for one fabric.

    Args:
        control: carries what the ranks tell each other.
    """

    def __init__(self, control: StoreControlPlane) -> None:
        self._control = control
        self._given_up = threading.Event()

    def patience(self, expiry: float) -> Patience:
        """Until that moment, or until the fabric closes."""
        return Patience(expiry, self._given_up)

    def give_up(self) -> None:
        """What is being made will not be used."""
        self._given_up.set()

    def build(self, plan: Plan, patience: Patience) -> Channel:
        """Make a channel together with all its members, every one of which calls this.

        Raises `CommunicatorFailed` when a member does not come in time; names it.
        """
        STRANDED.sweep()
        membership = plan.membership
        store = Introduction(self._control, _question(membership), membership.ranks, patience)
        try:
            self._meet("here", membership, membership.ranks, patience)
            if membership.rank > 0:
                self._follow(membership, patience)
                return self._make(plan, store, patience)
            with Turn(self._control, membership.name, patience):
                self._lead(membership, patience)
                return self._make(plan, store, patience)
        except BallotIncomplete as error:
            raise CommunicatorFailed(
                f"{membership.name}: the ranks did not all meet in time: "
                f"no word from rank(s) {error.missing}"
            ) from error
        except ControlError as error:
            raise CommunicatorFailed(f"{membership.name}: {error}") from error

    def _lead(self, membership: Membership, patience: Patience) -> None:
        """It is this communicator's turn: call the others, and see that they still live. What HCCL
        opens for a meeting that does not take place it never closes."""
        self._control.cast(f"{_question(membership)}/turn", b"")
        self._meet("ready", membership, membership.ranks, patience)

    def _follow(self, membership: Membership, patience: Patience) -> None:
        collected(self._control, f"{_question(membership)}/turn", membership.ranks[:1], patience)
        self._control.cast(f"{_question(membership)}/ready", b"")

    def _meet(
        self, where: str, membership: Membership, ranks: tuple[int, ...], patience: Patience
    ) -> None:
        """Say to be there, and wait for these ranks. Raises `BallotIncomplete`."""
        question = f"{_question(membership)}/{where}"
        self._control.cast(question, b"")
        collected(self._control, question, ranks, patience)

    def _make(self, plan: Plan, store: Introduction, patience: Patience) -> Channel:
        name = plan.membership.name
        made = _elsewhere(lambda: _greeted(plan, store), name)
        try:
            channel, greeting = made.result(patience.left)
        except TimeoutError as error:
            made.add_done_callback(_strand)
            raise CommunicatorFailed(f"{name}: HCCL did not make it in time") from error
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise CommunicatorFailed(f"{name}: HCCL did not make it: {why}") from error
        while (fate := greeting.flight.look()) is Fate.UNDER_WAY and patience.left:
            time.sleep(PAUSE)
        if fate is Fate.LANDED:
            return channel
        STRANDED.keep(channel)
        raise CommunicatorFailed(f"{name}: the greeting did not end: {greeting.flight.error}")


def _question(membership: Membership) -> str:
    return f"hccl/{membership.name}"


def _greeted(plan: Plan, store: Introduction) -> tuple[Channel, Greeting]:
    """Make a group; its first operation blocks until every member has called it."""
    membership, npu = plan.membership, native.npu()
    native.settle_thread(plan.index)
    device, account = torch.device("npu", plan.index), lanes(npu, plan.index)
    with high_priority(), native.current(account.aim()):
        group = make_group(store, membership)
        greeting = plan.greet(group, membership.rank, len(membership.ranks), device)
    store.forget()
    lane = account.take(group.get_coll_stream_id(device), membership.name)
    berth = Berth(device, account, lane)
    return Channel(membership, group, store, berth, greeting.scratch), greeting


def _elsewhere(
    call: Callable[[], tuple[Channel, Greeting]], name: str
) -> Future[tuple[Channel, Greeting]]:
    """On a thread of its own, for nobody can end the call."""
    answer: Future[tuple[Channel, Greeting]] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # the caller hears it
            answer.set_exception(error)

    threading.Thread(target=run, name=f"equipoise.hccl.{name}", daemon=True).start()
    return answer


def _strand(made: Future[tuple[Channel, Greeting]]) -> None:
    """It came too late: keep what HCCL made."""
    if made.exception() is None:
        STRANDED.keep(made.result()[0])
