"""The animated picture of the README: a real run under `equipoise run --live`, recorded.

    python benchmarks/live_picture.py             writes docs/images/live.svg
    python benchmarks/live_picture.py -o FILE     writes it there
    python benchmarks/live_picture.py --quick     a short run; nothing is kept

The frames are those that a terminal of 80 x 24 gets. The start of the ranks, the wait for the first
sample of a pass and most of the reference pass are left out; the rest is played as much faster as
brings it to 16 seconds, and the title says how much.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import terminal_size
from pathlib import Path

from lib.animated_svg import TimedFrame, animated_svg
from lib.results import ROOT

from equipoise.cli.live import LiveDisplay, live_setup
from equipoise.cli.run_options import resolve_run_request
from equipoise.demo.launcher import run_demo, with_communicator
from equipoise.demo.settings import EXPERTS, LAYERS
from equipoise.report.live.styled_text import Line, plain

PICTURE = ROOT / "docs" / "images" / "live.svg"
SIZE = terminal_size((80, 24))
SECONDS = 16.0
"""Of the picture, before its last frame is held."""
LEAST = 0.25
"""Seconds of the picture for which a frame is shown at least; others are left out."""
LAST = 3.0
"""Seconds for which the last frame is held."""
REFERENCE_SECONDS = 1.0
"""Of the reference pass, that are shown."""


Frame = tuple[float, tuple[Line, ...]]
"""When it was shown, and what."""


@dataclass
class RecordingScreen:
    """Keeps every frame that differs from the one before, and when it was shown."""

    frames: list[Frame] = field(default_factory=list)

    def size(self) -> terminal_size:
        """See `Screen`."""
        return SIZE

    def show(self, lines: tuple[Line, ...]) -> None:
        """See `Screen`."""
        if not self.frames or self.frames[-1][1] != lines:
            self.frames.append((time.monotonic(), lines))


def record(steps: int) -> RecordingScreen:
    """The frames of a run with its defaults and so many steps."""
    request = resolve_run_request({"live": True, "steps": steps}, {})
    settings = with_communicator(request.settings)
    screen = RecordingScreen()
    display = LiveDisplay(live_setup(settings, LAYERS, EXPERTS), screen)
    display.start()
    try:
        run_demo(settings, display)
        display.done()
    finally:
        display.stop()
    return screen


def shorten(frames: Sequence[Frame]) -> tuple[list[TimedFrame], float]:
    """The frames of the picture, and how much faster than recorded they are shown."""
    began = next(i for i, (_, lines) in enumerate(frames) if "pass 1/" in _text(lines))
    check = next(i for i, (_, lines) in enumerate(frames) if "check:" in _text(lines))
    end = frames[check][0] + REFERENCE_SECONDS
    shown = _without_empty(frame for frame in frames[began:] if frame[0] <= end)
    speed = max((shown[-1][0] - shown[0][0]) / SECONDS, 1.0)
    kept = [shown[0]]
    for at, lines in shown[1:]:
        if at - kept[-1][0] >= LEAST * speed:
            kept.append((at, lines))
    kept.append((kept[-1][0] + LEAST * speed, frames[-1][1]))
    times = [at for at, _ in kept]
    seconds = [(b - a) / speed for a, b in pairwise(times)]
    pairs = zip(kept, [*seconds, LAST], strict=True)
    return [TimedFrame(lines, length) for (_, lines), length in pairs], speed


def _without_empty(frames: Iterable[Frame]) -> list[Frame]:
    """The frames on which a step is seen, and the time in which none was taken out."""
    kept: list[Frame] = []
    cut = 0.0
    emptied: float | None = None
    for at, lines in frames:
        if "no step is sampled yet" in _text(lines):
            emptied = at if emptied is None else emptied
            continue
        if emptied is not None:
            cut, emptied = cut + at - emptied, None
        kept.append((at - cut, lines))
    return kept


def _text(lines: tuple[Line, ...]) -> str:
    return "\n".join(map(plain, lines))


def main() -> int:
    """Record, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", type=Path, default=PICTURE, metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    frames, speed = shorten(record(24 if options.quick else 72).frames)
    # Where motion is not wanted: weights have just moved, and the load is even.
    even = [i for i, frame in enumerate(frames) if "→" in _text(frame.lines)]
    title = f"$ equipoise run --live    a recorded run, {speed:.1f} times faster"
    svg = animated_svg(
        frames, SIZE.columns, SIZE.lines, title=title, still=even[-1] if even else len(frames) - 1
    )
    if not options.quick:
        options.o.write_text(svg, encoding="utf-8")
    print(f"{len(frames)} frames, {len(svg) / 1000:.0f} kB, {speed:.2f} times faster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
