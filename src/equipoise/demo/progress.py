"""Progress of a run, as ranks report it; the command line shows it."""

from typing import Protocol


class RunProgress(Protocol):
    """Told from the process that drives the run."""

    def variant(self, name: str, steps: int) -> None:
        """A pass over the traffic begins."""
        ...

    def step(self, done: int, imbalance: float, note: str) -> None:
        """`done` steps of it are through; `imbalance` is the last step's, over ranks."""
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

    def done(self) -> None:
        """Nothing to say."""
