"""The end of a channel: its members give it back together, or not at all.

A communicator of HCCL's must not be given back while a member still uses it: what runs there would
end with an error, on every member. So a member whose part has ended says so, and gives the channel
back when all have said it. Nobody waits for that: closing only starts it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from equipoise.backends.ascend.channel import Channel
from equipoise.backends.ascend.stranded import STRANDED
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import BallotIncomplete, ControlError

PAUSE = 0.005
"""Seconds between two looks of `finish`."""


@dataclass
class Parting:
    """A channel that nobody here issues on any more.

    Attributes:
        channel: the channel.
        told: whether the other members know.
    """

    channel: Channel
    told: bool = False


class Partings:
    """The channels of one fabric that are being given back. For any number of threads.

    Args:
        control: carries the farewells.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._open: list[Parting] = []

    def add(self, channel: Channel) -> None:
        """Give it back when that can be."""
        with self._lock:
            self._open.append(Parting(channel))

    def tick(self) -> bool:
        """Go as far as possible without waiting; whether something is left."""
        with self._lock:
            self._open = [parting for parting in self._open if not self._part(parting)]
            return bool(self._open)

    def finish(self, timeout: Callable[[], float]) -> None:
        """Go on for so many seconds, asked each time; then strand what is left."""
        start = time.monotonic()
        while self.tick() and time.monotonic() - start < timeout():
            time.sleep(PAUSE)
        with self._lock:
            left, self._open = self._open, []
        for parting in left:
            STRANDED.keep(parting.channel)

    def _part(self, parting: Parting) -> bool:
        """Whether it is over and done with."""
        membership = parting.channel.membership
        question = f"hccl/{membership.name}/farewell"
        if not parting.channel.reap():
            return False
        try:
            if not parting.told:
                self._control.cast(question, b"")
                parting.told = True
            self._control.collect(question, 0.0, membership.ranks)
        except BallotIncomplete:
            return False
        except ControlError:
            STRANDED.keep(parting.channel)
            return True
        parting.channel.close()
        return True
