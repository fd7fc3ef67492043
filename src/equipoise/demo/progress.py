"""Progress of a run, as ranks report it; the command line shows it."""

from typing import Any, Protocol

LiveMessage = dict[str, Any]
"""What a live display is told, as JSON has it; `equipoise.demo.live_feed` says what there is."""


class RunProgress(Protocol):
    """Told from the process that drives the run."""

    def variant(self, name: str, steps: int) -> None:
        """A pass over the traffic begins."""
        ...

    def step(self, done: int, imbalance: float, note: str) -> None:
        """`done` steps of it are through; `imbalance` is that of the last summed steps."""
        ...

    def live(self, message: LiveMessage) -> None:
        """Something happened that only a live display shows; not told without `--live`."""
        ...

    def done(self) -> None:
        """The run is over."""
        ...


class NoProgress:
    """Nobody watches."""

    def variant(self, name: str, steps: int) -> None:
        """Nothing to say."""

    def step(self, done: int, imbalance: float, note: str) -> None:
        """Nothing to say."""

    def live(self, message: LiveMessage) -> None:
        """Nothing to say."""

    def done(self) -> None:
        """Nothing to say."""
