"""The first operations of a group: libraries build their links with them, and block meanwhile.

Each kind of collective has links of its own, and so has every pair of ranks in a batch. So all of
them are used once, by all ranks at once, before anybody else uses the group.

Makes channels: bounded, each on a stream of its own; one at a time on a rank where need be.

**Attempts.** Where a channel was not made in time, its members may try again under the same name.
Each takes back what it has said then: a rank that comes late must not take the "here" of an
attempt that was given up for that of a rank which waits. The first member numbers the attempts and
says the number with "turn"; all later words, and what the library gets to hear, carry it. A
member never joins an attempt twice: where the library's members meet may be told once only.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.backends.common.bounded_wait import Patience
from equipoise.backends.common.control_plane import StoreControlPlane
from equipoise.backends.devices.collectives.bootstrap import Talk, Turn
from equipoise.backends.devices.collectives.ccl import Greet, Greeting, Group, Library, Membership
from equipoise.backends.devices.collectives.comm_stream import Channel
from equipoise.backends.devices.collectives.teardown import STRANDED
from equipoise.backends.devices.collectives.work import Fate
from equipoise.backends.devices.runtime import Device
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, ControlError
from equipoise.hal.support.native_call_guard import ABROAD


def greet_all(group: Group, rank: int, size: int, device: Any) -> Greeting:
    """Use every kind of operation of a communicator; the sum comes last, for it joins all."""
    word, words = _zeros(1, torch.int32, device), _zeros(size, torch.int32, device)
    into, given = _zeros(size, torch.int8, device), _zeros(size, torch.int8, device)
    byte = _zeros(1, torch.int8, device)
    group.all_gather(into, byte)
    group.reduce_scatter(word, words)
    group.broadcast(byte, 0)
    group.all_to_all(into, given, (), ())
    group.all_to_all(into, given, [1] * size, [1] * size)
    peers = [peer for peer in range(size) if peer != rank]
    if peers:
        ways = ["irecv"] * len(peers) + ["isend"] * len(peers)
        blobs = [part[peer : peer + 1] for part in (into, given) for peer in peers]
        group.batch(ways, blobs, peers + peers)
    last = group.all_reduce(word)
    return Greeting(last, (word, words, into, given, byte), byte)


def greet_peer(group: Group, rank: int, size: int, device: Any) -> Greeting:
    """Send a byte from rank 0 to rank 1."""
    byte = _zeros(1, torch.int8, device)
    sent = group.message("isend" if rank == 0 else "irecv", byte, 1 - rank)
    return Greeting(sent, (byte,), byte)


def _zeros(count: int, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.zeros(count, dtype=dtype).to(device)


PAUSE = 0.0005
"""Seconds between two looks at whether the greeting has ended."""
EARLIER_PAUSE = 0.005
"""Seconds between two looks at whether an earlier channel has been made."""


@dataclass(frozen=True)
class Plan:
    """What is to be made.

    Attributes:
        membership: of the group.
        greet: its first operations.
        device: where it runs.
    """

    membership: Membership
    greet: Greet
    device: Device


class PendingChannels:
    """Channels of this process that are being made, also those that nobody waits for any more.

    Nobody can end a library's call, so one that was given up goes on, and the next has to wait for
    it. Torch_npu takes the next stream of its pool for whatever is made: of two at once one would
    run on a stream that is not its own, behind whatever hangs there. And each first operation
    blocks torch_npu's launch queue until all members have issued it, so that they must come in one
    order on all ranks.

    For any number of threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Future[Channel], tuple[Builder, Membership]] = {}

    def add(self, made: Future[Channel], builder: "Builder", membership: Membership) -> None:
        """It is being made from now on."""
        with self._lock:
            self._under_way[made] = builder, membership

    def remove(self, made: Future[Channel]) -> None:
        """The library has returned, with or without a channel."""
        with self._lock:
            self._under_way.pop(made, None)

    def forget_lost(self, builder: "Builder", lost: int) -> None:
        """Forget what `builder` makes with a lost rank: it will never issue all of its operations,
        and the survivors must be able to make others."""
        with self._lock:
            for made, (owner, membership) in list(self._under_way.items()):
                if owner is builder and lost in membership.ranks:
                    del self._under_way[made]

    def names(self) -> tuple[str, ...]:
        """What is being made."""
        with self._lock:
            return tuple(membership.name for _, membership in self._under_way.values())


PENDING_CHANNELS = PendingChannels()
"""Of this process, for all fabrics: the launch queue is the process's."""


class Builder:
    """Makes channels for one fabric.

    Args:
        library: whose.
        control: carries what the ranks tell each other.
    """

    def __init__(self, library: Library, control: StoreControlPlane) -> None:
        self._library = library
        self._control = control
        self._given_up = threading.Event()
        self._attempts: dict[str, int] = {}
        """By name of what could not be made yet: the last attempt that this rank took part in."""

    def patience(self, expiry: float) -> Patience:
        """Until that moment, or until the fabric closes."""
        return Patience(expiry, self._given_up)

    def give_up(self) -> None:
        """What is being made will not be used."""
        self._given_up.set()
        self._drop_lost()  # later nobody can ask this control plane who was lost

    def build(self, plan: Plan, patience: Patience) -> Channel:
        """Make a channel together with all its members, every one of which calls this.

        After a failure all of them may call it again. Raises `CommunicatorFailed` when a member
        does not come in time; names it. Also when a channel that was given up is still being made.
        """
        STRANDED.sweep()
        name = plan.membership.name
        talk = Talk(self._control, f"{self._library.name}/{name}", plan.membership.ranks, patience)
        try:
            channel = self._meet(plan, talk, patience)
        except BallotIncomplete as error:
            raise CommunicatorFailed(
                f"{name}: the ranks did not all meet in time: no word from rank(s) {error.missing}"
            ) from error
        except ControlError as error:
            raise CommunicatorFailed(f"{name}: {error}") from error
        finally:
            # After a success every member has heard everything, for its greeting has ended.
            with suppress(ControlError):
                talk.withdraw()
        self._attempts.pop(name, None)
        return channel

    def _meet(self, plan: Plan, talk: Talk, patience: Patience) -> Channel:
        """Agree on the attempt, and that all members are about to make it."""
        membership = plan.membership
        talk.meet("here", membership.ranks)
        if membership.rank > 0:
            number = self._hear_attempt(membership, talk, patience)
            self._await_earlier(membership.name, patience)
            return self._try(plan, number, patience)
        with self._turn(membership, patience):
            self._await_earlier(membership.name, patience)
            number = self._attempts.get(membership.name, -1) + 1
            talk.say("turn", b"%d" % number)
            return self._try(plan, number, patience)

    def _turn(self, membership: Membership, patience: Patience) -> AbstractContextManager[None]:
        """Of all members, where the library can make only one at a time on a rank."""
        if not self._library.one_at_a_time:
            return nullcontext()
        return Turn(self._control, self._library.name, membership.name, membership.ranks, patience)

    def _hear_attempt(self, membership: Membership, talk: Talk, patience: Patience) -> int:
        """The number of the first member's attempt, a new one."""
        (first, *_), name = membership.ranks, membership.name
        while True:
            (said,) = talk.hear("turn", (first,))
            if int(said) > self._attempts.get(name, -1):
                return int(said)
            if patience.left == 0.0:
                raise CommunicatorFailed(
                    f"{name}: rank {first} is still in attempt {int(said)}, which failed here"
                )
            time.sleep(EARLIER_PAUSE)

    def _try(self, plan: Plan, number: int, patience: Patience) -> Channel:
        """One attempt. The members are asked whether they are ready before the library is: what it
        opens for a meeting that does not take place it never closes."""
        membership = plan.membership
        self._attempts[membership.name] = number
        if number:
            plan = replace(plan, membership=membership.for_attempt(number))
        question = f"{self._library.name}/{membership.name}/{number}"
        talk = Talk(self._control, question, membership.ranks, patience)
        if membership.rank > 0:
            talk.say("ready")
        else:
            talk.meet("ready", membership.ranks)
        channel = self._make(plan, talk, patience)
        # Not after a failure: whoever comes later goes on to the library, and hears its reason.
        with suppress(ControlError):
            talk.withdraw()
        return channel

    def _await_earlier(self, name: str, patience: Patience) -> None:
        """Wait until nothing is being made here that was given up, where the library needs that."""
        while self._library.one_at_a_time and (earlier := PENDING_CHANNELS.names()):
            self._drop_lost()
            if patience.left == 0.0:
                raise CommunicatorFailed(
                    f"{name}: {self._library.title} is still making {earlier[0]}, "
                    "which was begun before and cannot be stopped"
                )
            time.sleep(EARLIER_PAUSE)

    def _drop_lost(self) -> None:
        if PENDING_CHANNELS.names() and (loss := self._control.lost(0.0)) is not None:
            PENDING_CHANNELS.forget_lost(self, loss.rank)

    def _make(self, plan: Plan, talk: Talk, patience: Patience) -> Channel:
        name, title = plan.membership.name, self._library.title
        made: Future[Channel] = Future()
        PENDING_CHANNELS.add(made, self, plan.membership)
        self._elsewhere(lambda: self._greeted(plan, talk), made, name)
        try:
            channel = made.result(patience.left)
        except TimeoutError as error:
            made.add_done_callback(_strand)
            raise CommunicatorFailed(f"{name}: {title} did not make it in time") from error
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise CommunicatorFailed(f"{name}: {title} did not make it: {why}") from error
        while (fate := channel.greeting.look()) is Fate.UNDER_WAY and patience.left:
            time.sleep(PAUSE)
        if fate is Fate.LANDED:
            return channel
        STRANDED.keep(channel)
        raise CommunicatorFailed(f"{name}: the greeting did not end: {channel.greeting.error}")

    def _greeted(self, plan: Plan, talk: Talk) -> Channel:
        """Its first operations may block until every member has called them."""
        plan.device.settle()
        group, greeting = self._library.meet(plan.membership, plan.device, talk, plan.greet)
        return Channel(plan.membership, self._library, group, plan.device, greeting)

    def _elsewhere(self, call: Callable[[], Channel], answer: Future[Channel], name: str) -> None:
        """On a thread of its own, for nobody can end the call."""

        def run() -> None:
            try:
                channel = call()
            except BaseException as error:  # the caller hears it
                PENDING_CHANNELS.remove(answer)
                answer.set_exception(error)
            else:
                PENDING_CHANNELS.remove(answer)  # first: the caller may make the next one at once
                answer.set_result(channel)

        title = f"equipoise.{self._library.name}.{name}"
        threading.Thread(target=ABROAD(run), name=title, daemon=True).start()


def _strand(made: Future[Channel]) -> None:
    """It came too late: keep what was made."""
    if made.exception() is None:
        STRANDED.keep(made.result())
