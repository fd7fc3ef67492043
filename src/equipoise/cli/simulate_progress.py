"""How the progress of many runs looks: a bar on a terminal, a line now and then elsewhere."""

import sys
from typing import NoReturn, Protocol, TextIO

from tqdm import tqdm

LINES = 8
"""Of a log, in all."""


class Progress(Protocol):
    """Is told where a comparison is."""

    def at(self, label: str, seed: int, part: float) -> None:
        """`part` of the run of this policy and seed is done, 0 to 1."""
        ...

    def ended(self) -> None:
        """A run is over."""
        ...

    def close(self) -> None:
        """So are all."""
        ...


class Hidden:
    """Nobody hears of it."""

    def at(self, label: str, seed: int, part: float) -> None:
        """Nothing."""

    def ended(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Bar:
    """One, over all runs."""

    def __init__(self, runs: int, stream: TextIO) -> None:
        shape = "{desc:<26}{bar} {n:.0f}/{total_fmt} runs {elapsed}<{remaining}"
        self._whole = 0
        self._bar: tqdm[NoReturn] = tqdm(
            total=runs, file=stream, bar_format=shape, dynamic_ncols=True
        )

    def at(self, label: str, seed: int, part: float) -> None:
        """Show it."""
        self._bar.set_description_str(f"{label}, seed {seed}", refresh=False)
        self._bar.update(self._whole + min(part, 1.0) - self._bar.n)

    def ended(self) -> None:
        """Show it."""
        self._whole += 1
        self._bar.update(self._whole - self._bar.n)

    def close(self) -> None:
        """Leave it standing."""
        self._bar.close()


class Lines:
    """A few, for logs."""

    def __init__(self, runs: int, stream: TextIO) -> None:
        self._runs, self._stream, self._done = runs, stream, 0

    def at(self, label: str, seed: int, part: float) -> None:
        """Not told."""

    def ended(self) -> None:
        """Told where it completes an eighth of all."""
        before = self._done * LINES // self._runs
        self._done += 1
        if self._done * LINES // self._runs > before:
            print(f"{self._done}/{self._runs} runs", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing stays open."""


def progress_for(wish: str, runs: int) -> Progress:
    """What suits standard error; `hidden` is silent."""
    if wish == "hidden":
        return Hidden()
    return Bar(runs, sys.stderr) if sys.stderr.isatty() else Lines(runs, sys.stderr)
