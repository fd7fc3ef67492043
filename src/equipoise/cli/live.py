"""The live display of `equipoise run --live`: a thread that draws what the run tells.

The run never waits for it: messages go through a bounded queue, and what does not fit is dropped
and counted. The display holds what matters long enough to be seen, and so falls behind the serving;
it says by how much. Design: docs/design/live-display.md.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Full, Queue
from types import TracebackType
from typing import Protocol, TextIO

from equipoise.connection import is_launched
from equipoise.demo.progress import LiveMessage
from equipoise.demo.settings import RunSettings, served_variants
from equipoise.demo.traffic import Traffic, load_phases
from equipoise.report.live.frame import ASCII, UNICODE, Glyphs, render_frame
from equipoise.report.live.state import LiveSetup, LiveState
from equipoise.report.live.styled_text import (
    ANSI_256,
    ANSI_BASIC,
    Line,
    Style,
    to_ansi,
)

QUEUE_CAPACITY = 4096
"""Messages that wait for the display: many minutes of a run on a CPU."""
REDRAW = 0.1
"""Seconds from one frame to the next at least, and from one look at the terminal's size."""
MINOR_LAG, MAJOR_LAG = 3.0, 10.0
"""Seconds behind the serving from which small holds, and from which all, are left out."""
SAMPLE_HOLD, SMALL_HOLD, LARGE_HOLD = 0.1, 0.3, 1.5
"""Seconds that a sampled step, a plan without moves, and a move or a commit are shown."""
SWITCH_HOLD = 1.0
"""Seconds that the first step of a pass and of a text is shown."""
END_HOLD = 2.0
"""Seconds that the last frame of a finished run is shown."""
MAX_LOG_LINES = 1000
"""Lines of standard error that are kept until the screen is restored: the last ones."""
UNKNOWN_SIZE = os.terminal_size((80, 24))


class Screen(Protocol):
    """What frames are shown on."""

    def size(self) -> os.terminal_size:
        """Columns and lines."""
        ...

    def show(self, lines: tuple[Line, ...]) -> None:
        """Replace what is shown."""
        ...


class Terminal:
    """The alternate screen of a terminal, from `open` to `close`.

    Args:
        stream: to the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._is_open = False
        self._size = UNKNOWN_SIZE
        self._codes = _colour_codes()

    def open(self) -> None:
        """Save the screen, and hide the cursor."""
        with self._lock:
            self._is_open = True
            self._write("\033[?1049h\033[?25l\033[2J")

    def close(self) -> None:
        """Restore the screen; no frame is drawn after it."""
        # A draw that waits for a terminal that is stopped (Ctrl-S) holds the lock: a bounded wait
        # leaves the screen all the same, behind what is being written.
        locked = self._lock.acquire(timeout=1.0)
        try:
            if self._is_open:
                self._is_open = False
                self._write("\033[?25h\033[?1049l")
        finally:
            if locked:
                self._lock.release()

    def size(self) -> os.terminal_size:
        """Columns and lines; a usual size where the terminal does not know its own."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return UNKNOWN_SIZE
        return size if size.columns and size.lines else UNKNOWN_SIZE

    def show(self, lines: tuple[Line, ...]) -> None:
        """See `Screen`."""
        size = self.size()
        begin = "\033[?2026h\033[H" if size == self._size else "\033[?2026h\033[2J\033[H"
        self._size = size
        body = "\033[K\r\n".join(to_ansi(line, self._codes) for line in lines)
        with self._lock:
            if self._is_open:
                self._write(f"{begin}{body}\033[K\033[J\033[?2026l")

    def _write(self, text: str) -> None:
        # A terminal that is gone ends the run by SIGHUP; drawing need not fail first.
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


class CapturedStderr:
    """Catches what this process and its children write to standard error while a screen is up.

    Only where standard error is a terminal: a file may be written to meanwhile.

    Args:
        on_line: gets each line, on a thread of its own.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._total = 0
        self._saved: int | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin to catch."""
        if not sys.stderr.isatty():
            return
        sys.stderr.flush()
        read, write = os.pipe()
        self._saved = os.dup(sys.stderr.fileno())
        os.dup2(write, sys.stderr.fileno())
        os.close(write)
        # A daemon: a child that outlives the run would keep the pipe open.
        self._thread = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and write what was caught."""
        if self._saved is None or self._thread is None:
            return
        sys.stderr.flush()
        os.dup2(self._saved, sys.stderr.fileno())
        os.close(self._saved)
        self._saved = None
        self._thread.join(1.0)
        with suppress(OSError):
            if (left_out := self._total - len(self._lines)) > 0:
                print(f"({left_out} earlier lines are left out)", file=sys.stderr)
            for line in list(self._lines):
                print(line, file=sys.stderr)
            sys.stderr.flush()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, errors="replace") as pipe:
            for line in pipe:
                self._total += 1
                self._lines.append(line.rstrip("\r\n"))
                self._on_line(self._lines[-1])


class _End:
    """Marks the end of the run."""


_Item = tuple[float, Callable[[LiveState], None], float]
"""When something was told, what it does to the state, how many seconds it is shown."""


class LiveDisplay:
    """Shows the progress of a run on a screen; see `RunProgress`.

    Args:
        setup: what is known of the run.
        screen: where frames are shown, on the thread of the display.
        glyphs: characters that it can show.
    """

    def __init__(self, setup: LiveSetup, screen: Screen, glyphs: Glyphs = UNICODE) -> None:
        self._state = LiveState(setup)
        self._screen = screen
        self._glyphs = glyphs
        self._queue: Queue[_Item | _End] = Queue(QUEUE_CAPACITY)
        self._phase = 0
        self._dropped = 0
        self._log_line = ""
        self._stopped = threading.Event()
        self._drawn_at = 0.0
        self._thread = threading.Thread(target=self._run, name="equipoise.live", daemon=True)

    def start(self) -> None:
        """Draw from now on."""
        self._thread.start()

    def variant(self, name: str, steps: int) -> None:
        """A pass over the traffic begins."""
        self._phase = 0
        self._put(lambda state: state.begin_pass(name), SMALL_HOLD)

    def step(self, done: int, imbalance: float, note: str) -> None:
        """`done` steps are through, of which no more is told."""
        self._put(lambda state: state.count_steps(done), 0.0)

    def live(self, message: LiveMessage) -> None:
        """Something happened; see `equipoise.demo.live_feed`."""
        self._put(lambda state: state.update(message), self._hold(message))

    def log(self, line: str) -> None:
        """Somebody wrote a line to standard error."""
        self._log_line = line

    def done(self) -> None:
        """The run is over: show what is left of it, then stop; interruptible."""
        while self._thread.is_alive():
            with suppress(Full):
                self._queue.put(_End(), timeout=REDRAW)
                break
        while self._thread.is_alive():
            self._thread.join(REDRAW)

    def stop(self) -> None:
        """Draw nothing more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _hold(self, message: LiveMessage) -> float:
        match message:
            case {"live": "load", "step": step}:
                phase = self._state.setup.phase(step)
                first, self._phase = phase != self._phase, phase
                return SWITCH_HOLD if first or step <= 1 else SAMPLE_HOLD
            case {"live": "moves"}:
                return LARGE_HOLD
            case {"live": "ended", "copies": copies}:
                return LARGE_HOLD if copies else SMALL_HOLD
            case {"live": "state", "state": "planning"}:
                return SMALL_HOLD
        return 0.0

    def _put(self, apply: Callable[[LiveState], None], hold: float) -> None:
        try:
            self._queue.put_nowait((time.monotonic(), apply, hold))
        except Full:
            self._dropped += 1

    def _run(self) -> None:
        """Take in what is told, draw, and hold."""
        while not self._stopped.is_set():
            try:
                item = self._queue.get(timeout=REDRAW)
            except Empty:
                self._state.behind = 0.0
                self._draw()
                continue
            if isinstance(item, _End):
                self._state.behind = 0.0
                self._draw()
                self._stopped.wait(END_HOLD)
                return
            told_at, apply, hold = item
            apply(self._state)
            self._state.behind = time.monotonic() - told_at
            self._show(hold)

    def _show(self, hold: float) -> None:
        behind = self._state.behind
        if behind > MAJOR_LAG or (hold <= SMALL_HOLD and behind > MINOR_LAG):
            hold = 0.0
        if hold or time.monotonic() - self._drawn_at >= REDRAW:
            self._draw()
            self._stopped.wait(hold)

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._state.log_line = self._log_line
        self._state.missing, missing = self._state.missing + self._dropped, self._state.missing
        size = self._screen.size()
        self._screen.show(render_frame(self._state, size.columns, size.lines, self._glyphs))
        self._state.missing = missing


def live_setup(settings: RunSettings, layers: int, experts: int) -> LiveSetup:
    """What a display knows before the run begins. Raises InvalidText for a text file."""
    phases = load_phases(settings.text)
    traffic = Traffic(phases, settings.steps, seed=settings.seed)
    return LiveSetup(
        ranks=settings.stage_ranks,
        layers=layers,
        experts=experts,
        stages=settings.pipeline_ranks,
        phases=tuple(phase.name for phase in phases),
        switch_steps=traffic.switch_steps,
        steps=settings.steps,
        passes=served_variants(settings),
        tokens=traffic.tokens,
        cores=0 if settings.backend != "cpu" or is_launched() else len(os.sched_getaffinity(0)),
    )


class LiveSession:
    """A display on a terminal; left, the terminal is as it was, whatever happened.

    Args:
        setup: what is known of the run.
        stream: to the terminal.
    """

    def __init__(self, setup: LiveSetup, stream: TextIO) -> None:
        self._terminal = Terminal(stream)
        self._display = LiveDisplay(setup, self._terminal, _glyphs(stream.encoding))
        self._stderr = CapturedStderr(self._display.log)

    def __enter__(self) -> LiveDisplay:
        try:
            self._stderr.open()
            self._terminal.open()
            self._display.start()
        except BaseException:
            self._restore()
            raise
        return self._display

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._display.done()
        finally:
            self._restore()

    def _restore(self) -> None:
        """In this order: no frame is drawn on the restored screen, and no line before it."""
        try:
            self._display.stop()
        finally:
            try:
                self._terminal.close()
            finally:
                self._stderr.close()


def _glyphs(encoding: str | None) -> Glyphs:
    return UNICODE if (encoding or "").lower().replace("-", "") == "utf8" else ASCII


def _colour_codes() -> dict[Style, str]:
    """https://no-color.org: set and not empty means no colour; bold and dim are none."""
    if os.environ.get("NO_COLOR"):
        return {style: code for style, code in ANSI_BASIC.items() if style in BRIGHTNESS}
    many = "256color" in os.environ.get("TERM", "") or os.environ.get("COLORTERM")
    return ANSI_256 if many else ANSI_BASIC


BRIGHTNESS = Style.BOLD, Style.DIM
