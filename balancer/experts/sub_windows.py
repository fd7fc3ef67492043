"""Which sub-windows of load are summed over ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SubWindows:
    """Steps in which load is counted to be summed; all numbers are steps.

    A plan is made from the last window before its boundary. Where nothing else needs loads, only
    the sub-windows of such windows are summed, and what is counted before is forgotten.

    Attributes:
        every: length of a sub-window.
        window: length of a window, a multiple of `every`.
        period: from the end of one window to the end of the next, a multiple of `every`; at least
            `window`, and then every sub-window is summed.
        phase: windows end this much behind multiples of `period`; a multiple of `every`.
        first: the step with which counting begins. A sub-window that began before it is short, and
            not summed: its load would count as that of a whole one.

    Raises:
        ValueError: they are not multiples, or windows overlap.
    """

    every: int
    window: int
    period: int
    phase: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if self.window % self.every or self.period % self.every or self.phase % self.every:
            raise ValueError(
                f"a window of {self.window} steps, one in {self.period} at {self.phase}, is not "
                f"made of {self.every}-step parts"
            )
        if self.period < self.window:
            raise ValueError(f"windows of {self.window} steps overlap, one in {self.period}")

    def ends(self, step: int) -> bool:
        """Whether a sub-window that is summed ends before `step`."""
        whole = step % self.every == 0 and step - self.every >= self.first
        return whole and self._left(step) < self.window

    def opens(self, step: int) -> bool:
        """Whether what is counted from `step` on is summed, and what was counted before is not."""
        left = self._left(step)
        short = step % self.every == 0 and step - self.every < self.first < step
        return (short and left < self.window) or (self.window < self.period and left == self.window)

    def following(self, step: int) -> int:
        """The first step behind `step` before which one of both is due."""
        found = (step // self.every + 1) * self.every
        found += max(0, self._left(found) - self.window)
        return found if self.ends(found) or self.opens(found) else self.following(found)

    def _left(self, step: int) -> int:
        """Steps to the end of the next window."""
        return (self.phase - step) % self.period
