"""Makes channels: bounded, one at a time in the run, each on a stream of its own."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from equipoise.backends.cpu.control import StoreControlPlane
from equipoise.backends.devices.collectives.channel import Channel
from equipoise.backends.devices.collectives.flight import Fate
from equipoise.backends.devices.collectives.library import Greet, Library, Membership
from equipoise.backends.devices.collectives.stranded import STRANDED
from equipoise.backends.devices.collectives.talk import Talk
from equipoise.backends.devices.collectives.turn import Turn
from equipoise.backends.devices.patience import Patience
from equipoise.backends.devices.vendor import Device
from equipoise.hal.abroad import ABROAD
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, ControlError

PAUSE = 0.0005
"""Seconds between two looks at whether the greeting has ended."""


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
        question = f"{self._library.name}/{membership.name}"
        talk = Talk(self._control, question, membership.ranks, patience)
        try:
            talk.meet("here", membership.ranks)
            if membership.rank > 0:
                talk.hear("turn", membership.ranks[:1])
                talk.say("ready")
                return self._make(plan, talk, patience)
            with Turn(self._control, self._library.name, membership.name, patience):
                # Call the others, and see that they still live: what a library opens for a meeting
                # that does not take place it never closes.
                talk.say("turn")
                talk.meet("ready", membership.ranks)
                return self._make(plan, talk, patience)
        except BallotIncomplete as error:
            raise CommunicatorFailed(
                f"{membership.name}: the ranks did not all meet in time: "
                f"no word from rank(s) {error.missing}"
            ) from error
        except ControlError as error:
            raise CommunicatorFailed(f"{membership.name}: {error}") from error

    def _make(self, plan: Plan, talk: Talk, patience: Patience) -> Channel:
        name, title = plan.membership.name, self._library.title
        made = self._elsewhere(lambda: self._greeted(plan, talk), name)
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

    def _elsewhere(self, call: Callable[[], Channel], name: str) -> Future[Channel]:
        """On a thread of its own, for nobody can end the call."""
        answer: Future[Channel] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # the caller hears it
                answer.set_exception(error)

        title = f"equipoise.{self._library.name}.{name}"
        threading.Thread(target=ABROAD(run), name=title, daemon=True).start()
        return answer


def _strand(made: Future[Channel]) -> None:
    """It came too late: keep what was made."""
    if made.exception() is None:
        STRANDED.keep(made.result())
