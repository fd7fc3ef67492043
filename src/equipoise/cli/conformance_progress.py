"""How the progress of a conformance run looks: a bar on a terminal, a line a family elsewhere."""

import sys
from typing import NoReturn, Protocol, TextIO

from tqdm import tqdm

from equipoise.hal.conformance.conduct import Bout
from equipoise.hal.conformance.result import Finding, Status


class Watch(Protocol):
    """A watcher that can be told that the run is over."""

    def begin(self, total: int) -> None:
        """So many bouts are to come."""
        ...

    def next(self, bout: Bout) -> None:
        """This one starts."""
        ...

    def found(self, finding: Finding) -> None:
        """It has ended."""
        ...

    def done(self) -> None:
        """Nothing more comes."""
        ...


class Bar:
    """One bar over all properties; violations are named at once, above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm[NoReturn] | None = None

    def begin(self, total: int) -> None:
        """Draw it empty."""
        shape = "{desc:<22}{bar} {n_fmt}/{total_fmt} properties {elapsed}"
        self._bar = tqdm(total=total, file=self._stream, bar_format=shape, dynamic_ncols=True)

    def next(self, bout: Bout) -> None:
        """Say which family plays where."""
        if self._bar is not None:
            self._bar.set_description_str(f"{bout.claim.family} ({bout.executor.value})")

    def found(self, finding: Finding) -> None:
        """One further."""
        if self._bar is None:
            return
        if finding.status is Status.VIOLATED:
            self._bar.write(f"violated: {finding.claim}", file=self._stream)
        self._bar.update(1)

    def done(self) -> None:
        """Leave it standing."""
        if self._bar is not None:
            self._bar.close()


class Lines:
    """A line when a family begins, and one for every violation; for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total, self._count, self._family = 0, 0, ""

    def begin(self, total: int) -> None:
        """Remember how many."""
        self._total = total

    def next(self, bout: Bout) -> None:
        """Name a family that begins."""
        if bout.claim.family != self._family:
            self._family = bout.claim.family
            self._say(f"{self._count}/{self._total} properties; {self._family}")

    def found(self, finding: Finding) -> None:
        """Name a violation."""
        self._count += 1
        if finding.status is Status.VIOLATED:
            self._say(f"violated: {finding.claim}")

    def done(self) -> None:
        """Nothing stays open."""

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Silence:
    """Says nothing."""

    def begin(self, total: int) -> None:
        """Nothing."""

    def next(self, bout: Bout) -> None:
        """Nothing."""

    def found(self, finding: Finding) -> None:
        """Nothing."""

    def done(self) -> None:
        """Nothing."""


def watcher_for(wish: str) -> Watch:
    """What suits standard error; `hidden` is silent."""
    if wish == "hidden":
        return Silence()
    return Bar(sys.stderr) if sys.stderr.isatty() else Lines(sys.stderr)
