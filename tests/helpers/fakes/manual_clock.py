"""A clock whose time is set by hand, and whose callbacks run when they are told to."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class ManualTimer:
    """A callback that is due at `at`, unless it is cancelled."""

    at: float
    callback: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class ManualClock:
    """Attributes:
    now: its time, in seconds.
    timers: those that are not due yet.
    soon: callbacks at the end of this turn.
    """

    now: float = 0.0
    timers: list[ManualTimer] = field(default_factory=list)
    soon: list[ManualTimer] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], object]) -> ManualTimer:
        self.soon.append(ManualTimer(self.now, callback))
        return self.soon[-1]

    def call_later(self, delay: float, callback: Callable[[], object]) -> ManualTimer:
        self.timers.append(ManualTimer(self.now + delay, callback))
        return self.timers[-1]

    def end_turn(self) -> None:
        """Call what is due at the end of this turn; what that schedules is of the next one."""
        due, self.soon = self.soon, []
        for one in due:
            if not one.cancelled:
                one.callback()

    def advance(self, seconds: float) -> None:
        """Let time pass, and timers ring in their order."""
        end = self.now + seconds
        while due := [one for one in self.timers if one.at <= end and not one.cancelled]:
            first = min(due, key=lambda one: one.at)
            self.timers.remove(first)
            self.now = max(self.now, first.at)
            first.callback()
        self.now = end


class LoopTurns(ManualClock):
    """Turns are those of the running event loop; only time is set by hand."""

    def call_soon(self, callback: Callable[[], object]) -> ManualTimer:
        timer = super().call_soon(callback)
        asyncio.get_running_loop().call_soon(lambda: timer.cancelled or callback())
        return timer
