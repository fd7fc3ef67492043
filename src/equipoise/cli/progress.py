"""Progress of long commands: bars on a terminal, a line now and then elsewhere, or nothing.

For `run`, for work that is done part by part, and for `simulate`.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import NoReturn, Protocol, TextIO

from tqdm import tqdm

from equipoise.demo.progress import LiveMessage, NoProgress, RunProgress

LINES_PER_VARIANT = 4
SILENT = 10.0
"""Seconds in which a log need not say that something goes on."""


class RunProgressBars:
    """One bar per pass over the traffic, of which there are `passes`."""

    def __init__(self, stream: TextIO, passes: int = 1) -> None:
        self._stream, self._passes, self._begun = stream, passes, 0
        self._bar: tqdm[NoReturn] | None = None

    def variant(self, name: str, steps: int) -> None:
        """A pass over the traffic begins."""
        self.done()
        self._begun += 1
        shape = "{desc:<20}{bar} {n_fmt}/{total_fmt} steps {elapsed}{postfix}"
        self._bar = tqdm(
            desc=_numbered(name, self._begun, self._passes),
            total=steps,
            file=self._stream,
            bar_format=shape,
            dynamic_ncols=True,
        )

    def step(self, done: int, imbalance: float, note: str) -> None:
        """`done` steps are through."""
        if self._bar is not None:
            self._bar.set_postfix_str(_words(imbalance, note), refresh=False)
            self._bar.update(done - self._bar.n)

    def live(self, message: LiveMessage) -> None:
        """Nothing that a bar shows."""

    def done(self) -> None:
        """Leave the last bar standing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class RunProgressLines:
    """`LINES_PER_VARIANT` lines per pass, for logs; there are `passes`."""

    def __init__(self, stream: TextIO, passes: int = 1) -> None:
        self._stream, self._passes, self._begun = stream, passes, 0
        self._name, self._steps, self._next = "", 0, 0

    def variant(self, name: str, steps: int) -> None:
        """A pass over the traffic begins."""
        self._begun += 1
        self._name = _numbered(name, self._begun, self._passes)
        self._steps, self._next = steps, 1

    def step(self, done: int, imbalance: float, note: str) -> None:
        """`done` steps are through."""
        if done * LINES_PER_VARIANT < self._next * self._steps:
            return
        self._next = done * LINES_PER_VARIANT // max(self._steps, 1) + 1
        words = _words(imbalance, note)
        tail = f", {words}" if words else ""
        print(f"{self._name}: {done}/{self._steps} steps{tail}", file=self._stream, flush=True)

    def live(self, message: LiveMessage) -> None:
        """Nothing that a line says."""

    def done(self) -> None:
        """Nothing stays open."""


def run_progress_for(wish: str, passes: int = 1) -> RunProgress:
    """What suits standard error, for so many passes over the traffic; `hidden` is silent."""
    if wish == "hidden":
        return NoProgress()
    display = RunProgressBars if sys.stderr.isatty() else RunProgressLines
    return display(sys.stderr, passes)


def _numbered(name: str, number: int, passes: int) -> str:
    return name if passes == 1 else f"{name} ({number} of {passes})"


class PartProgress(Protocol):
    """Progress of long work, part by part."""

    def start_part(self, what: str) -> None:
        """This part begins."""
        ...

    def close(self) -> None:
        """All are done."""
        ...


class PartProgressBar:
    """One line on a terminal, with the time since it began."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name = name
        self._bar: tqdm[NoReturn] = tqdm(
            desc=name, file=stream, bar_format="{desc}  {elapsed}", leave=False
        )

    def start_part(self, what: str) -> None:
        """Show it."""
        self._bar.set_description_str(f"{self._name}: {what}")

    def close(self) -> None:
        """Leave nothing."""
        self._bar.close()


class PartProgressLog:
    """A line of a log now and then: none of work that is soon done."""

    def __init__(
        self, name: str, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._stream, self._clock = name, stream, clock
        self._began = self._last = clock()

    def start_part(self, what: str) -> None:
        """Told where `SILENT` seconds have passed since the line before."""
        now = self._clock()
        if now - self._last >= SILENT:
            self._last = now
            after = f"after {now - self._began:.0f} s"
            print(f"{self._name}: {what}, {after}", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing stays open."""


class NoPartProgress:
    """Shows nothing."""

    def start_part(self, what: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def part_progress_for(wish: str, name: str) -> PartProgress:
    """What suits standard error; `hidden` is silent."""
    if wish == "hidden":
        return NoPartProgress()
    return (
        PartProgressBar(name, sys.stderr)
        if sys.stderr.isatty()
        else PartProgressLog(name, sys.stderr)
    )


def _words(imbalance: float, note: str) -> str:
    words = [] if math.isnan(imbalance) else [f"summed imbalance {imbalance:.3f}"]
    return ", ".join([*words, note] if note else words)


LINES = 8
"""Of a log, in all."""


class SimulationProgress(Protocol):
    """Progress of a comparison of policies."""

    def update(self, label: str, seed: int, part: float) -> None:
        """`part` of the run of this policy and seed is done, 0 to 1."""
        ...

    def finish_run(self) -> None:
        """A run is over."""
        ...

    def close(self) -> None:
        """So are all."""
        ...


class NoSimulationProgress:
    """Shows nothing."""

    def update(self, label: str, seed: int, part: float) -> None:
        """Nothing."""

    def finish_run(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class SimulationProgressBar:
    """One, over all runs."""

    def __init__(self, runs: int, stream: TextIO) -> None:
        shape = "{desc:<26}{bar} {n:.0f}/{total_fmt} runs {elapsed}<{remaining}"
        self._whole = 0
        self._bar: tqdm[NoReturn] = tqdm(
            total=runs, file=stream, bar_format=shape, dynamic_ncols=True
        )

    def update(self, label: str, seed: int, part: float) -> None:
        """Show it."""
        self._bar.set_description_str(f"{label}, seed {seed}", refresh=False)
        self._bar.update(self._whole + min(part, 1.0) - self._bar.n)

    def finish_run(self) -> None:
        """Show it."""
        self._whole += 1
        self._bar.update(self._whole - self._bar.n)

    def close(self) -> None:
        """Leave it standing."""
        self._bar.close()


class SimulationProgressLines:
    """A few, for logs."""

    def __init__(self, runs: int, stream: TextIO) -> None:
        self._runs, self._stream, self._finished_runs = runs, stream, 0

    def update(self, label: str, seed: int, part: float) -> None:
        """Shows nothing."""

    def finish_run(self) -> None:
        """Told where it completes an eighth of all."""
        before = self._finished_runs * LINES // self._runs
        self._finished_runs += 1
        if self._finished_runs * LINES // self._runs > before:
            print(f"{self._finished_runs}/{self._runs} runs", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing stays open."""


def simulation_progress_for(wish: str, runs: int) -> SimulationProgress:
    """What suits standard error; `hidden` is silent."""
    if wish == "hidden":
        return NoSimulationProgress()
    return (
        SimulationProgressBar(runs, sys.stderr)
        if sys.stderr.isatty()
        else SimulationProgressLines(runs, sys.stderr)
    )
