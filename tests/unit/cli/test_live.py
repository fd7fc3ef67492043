"""The live display: its thread, its terminal, its option."""

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from os import terminal_size
from pathlib import Path

import pytest
from helpers.watchdog import WATCHDOG
from unit.cli.conftest import Answer
from unit.report.live.conftest import EVEN, UNEVEN, ended, live_setup, load

from equipoise.cli import live
from equipoise.cli.live import CapturedStderr, LiveDisplay, LiveSession, Terminal
from equipoise.cli.live import live_setup as setup_of
from equipoise.cli.run_options import resolve_run_request
from equipoise.demo.settings import RunSettings, VariantName
from equipoise.report.live.styled_text import Line, Span, plain


class FakeScreen:
    """Keeps frames; where it is shut, a frame waits until it is opened."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.drawing = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._changed = threading.Condition()

    def wait_for(self, words: str) -> None:
        """Until a frame shows these words."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(words in f for f in self.frames), WATCHDOG)

    def size(self) -> terminal_size:
        return terminal_size((80, 24))

    def show(self, lines: tuple[Line, ...]) -> None:
        self.drawing.set()
        assert self.gate.wait(WATCHDOG)
        with self._changed:
            self.frames.append("\n".join(map(plain, lines)))
            self._changed.notify_all()


@pytest.fixture(autouse=True)
def short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SAMPLE_HOLD", "SMALL_HOLD", "LARGE_HOLD", "SWITCH_HOLD", "END_HOLD"):
        monkeypatch.setattr(live, name, 0.001)


@pytest.fixture
def display() -> Iterator[tuple[LiveDisplay, FakeScreen]]:
    screen = FakeScreen()
    shown = LiveDisplay(live_setup(), screen)
    yield shown, screen
    screen.gate.set()
    shown.stop()


def test_live_display_shows_whole_run_before_it_ends(
    display: tuple[LiveDisplay, FakeScreen],
) -> None:
    shown, screen = display
    shown.start()
    shown.variant("local", 120)
    for message in (load(0, *UNEVEN), ended(1, 6), load(6, *EVEN)):
        shown.live(message)
    shown.variant("reference", 120)
    shown.step(120, float("nan"), "1 s")
    shown.done()
    assert any("all others wait" in frame for frame in screen.frames)
    assert any("imbalance 0.90 → 0.00" in frame for frame in screen.frames)
    assert "step 120/120" in screen.frames[-1]
    assert "paced" not in screen.frames[-1]
    shown.done()


def test_live_display_drops_and_counts_what_it_cannot_take(
    display: tuple[LiveDisplay, FakeScreen], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, screen = display
    screen.gate.clear()
    shown.start()
    shown.variant("local", 120)
    assert screen.drawing.wait(WATCHDOG)

    def tell() -> None:
        for step in range(live.QUEUE_CAPACITY + 7):
            shown.live({"live": "step", "step": step, "seconds": 0.1})

    # The display stands still: nobody who tells it anything waits.
    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    telling.join(WATCHDOG)
    assert not telling.is_alive()
    screen.gate.set()
    shown.done()
    count = int(screen.frames[-1].split(" events not shown")[0].split()[-1])
    assert 7 <= count <= 9  # the display may have held one or two of them already


def test_live_display_stops_without_showing_the_rest(
    display: tuple[LiveDisplay, FakeScreen], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, screen = display
    monkeypatch.setattr(live, "SWITCH_HOLD", 3 * WATCHDOG)
    monkeypatch.setattr(live, "LARGE_HOLD", 3 * WATCHDOG)
    shown.start()
    shown.variant("local", 120)
    shown.live(load(0, *UNEVEN))
    shown.live(ended(1, 6))
    screen.wait_for("all others wait")
    shown.stop()
    assert "equipoise.live" not in {thread.name for thread in threading.enumerate()}
    assert not any("moved 3 experts" in frame for frame in screen.frames)


def test_live_display_leaves_out_holds_when_far_behind(
    display: tuple[LiveDisplay, FakeScreen], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, screen = display
    monkeypatch.setattr(live, "MAJOR_LAG", -1.0)
    monkeypatch.setattr(live, "LARGE_HOLD", 3 * WATCHDOG)
    shown.start()
    shown.variant("local", 120)
    for number in range(1, 5):
        shown.live(ended(number, 6))
    shown.done()  # with its holds it would take minutes, which the tests' time-out ends
    assert "rebalance 4 moved 3 experts" in screen.frames[-1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_live_display_that_fails_does_not_keep_the_run(
    display: tuple[LiveDisplay, FakeScreen], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, screen = display

    def fail(lines: tuple[Line, ...]) -> None:
        screen.drawing.set()
        raise ZeroDivisionError

    monkeypatch.setattr(screen, "show", fail)
    shown.start()
    for step in range(live.QUEUE_CAPACITY + 7):
        shown.live({"live": "step", "step": step, "seconds": 0.1})
    assert screen.drawing.wait(WATCHDOG)
    shown.done()
    assert screen.frames == []


def test_live_display_shows_line_of_log(display: tuple[LiveDisplay, FakeScreen]) -> None:
    shown, screen = display
    shown.start()
    shown.variant("local", 120)
    shown.log("W: a library\x1b[2J speaks")
    shown.done()
    assert "W: a library·[2J speaks" in screen.frames[-1]


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("none")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch) -> TerminalStream:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return TerminalStream()


def test_terminal_draws_nothing_before_it_is_opened_and_after_it_is_closed(
    stdout: TerminalStream,
) -> None:
    terminal = Terminal(stdout)
    terminal.show(((Span("early"),),))
    terminal.open()
    terminal.show(((Span("seen"),),))
    terminal.close()
    terminal.show(((Span("late"),),))
    terminal.close()
    text = stdout.getvalue()
    assert "seen" in text
    assert "early" not in text
    assert "late" not in text
    assert text.startswith("\033[?1049h\033[?25l")
    assert text.endswith("\033[?25h\033[?1049l")
    assert text.count("\033[?1049l") == 1


def fail_during_session(stdout: TerminalStream) -> None:
    with LiveSession(live_setup(), stdout) as shown:
        shown.variant("local", 120)
        raise RuntimeError("a rank")


def test_live_session_restores_terminal_when_the_run_fails(stdout: TerminalStream) -> None:
    with pytest.raises(RuntimeError, match="a rank"):
        fail_during_session(stdout)
    assert stdout.getvalue().endswith("\033[?25h\033[?1049l")


def test_live_session_without_colour_sends_none(
    stdout: TerminalStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    for no_colour, expected in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_colour)
        stdout.truncate(0)
        with LiveSession(live_setup(), stdout) as shown:
            shown.variant("local", 120)
            shown.live(load(0, *UNEVEN))
        assert ("\033[38;5;" in stdout.getvalue()) is expected
        assert "░" in stdout.getvalue()


def test_captured_stderr_keeps_the_last_lines_and_writes_them_when_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "MAX_LOG_LINES", 3)
    seen: list[str] = []
    master, slave = os.openpty()
    with os.fdopen(master, "rb", buffering=0) as screen, os.fdopen(slave, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        captured = CapturedStderr(seen.append)
        captured.open()
        os.write(stream.fileno(), b"a\nb\nc\n")  # as a child does, past Python's stream
        print("d", file=sys.stderr)
        print("e", file=sys.stderr, flush=True)
        captured.close()
        captured.close()
        written = b""
        while not written.endswith(b"e\r\n"):
            written += screen.read(4096)
    assert written.decode().split() == [
        "(2",
        "earlier",
        "lines",
        "are",
        "left",
        "out)",
        "c",
        "d",
        "e",
    ]
    assert seen == ["a", "b", "c", "d", "e"]


def test_captured_stderr_leaves_a_file_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []
    with (tmp_path / "err").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        captured = CapturedStderr(seen.append)
        captured.open()
        print("a", file=sys.stderr)
        captured.close()
    assert (tmp_path / "err").read_text() == "a\n"
    assert seen == []


Call = Callable[..., Answer]


def test_live_is_refused_without_terminal_before_anything_starts(
    equipoise: Call, launched_settings: list[RunSettings]
) -> None:
    answer = equipoise("run", "--live")
    assert answer.code == 2
    assert answer.err == (
        "equipoise: error: --live draws on a terminal, and standard output is none: leave it out\n"
    )
    assert launched_settings == []


@pytest.mark.parametrize(
    ("options", "term", "words"),
    [
        (("--live",), "dumb", "TERM is dumb or unset"),
        (("--live", "--quiet"), "xterm", "--quiet has no meaning with --live"),
    ],
)
def test_live_refuses_dumb_terminal_and_quiet(
    equipoise: Call,
    launched_settings: list[RunSettings],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    term: str,
    words: str,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", term)
    answer = equipoise("run", *options)
    assert answer.code == 2
    assert words in answer.err
    assert launched_settings == []


@pytest.mark.parametrize(
    ("options", "variants"),
    [
        ({}, ("unbalanced", "local")),
        ({"shares": "exact"}, ("unbalanced", "exact")),
        ({"variants": (VariantName.STATIC, VariantName.LOCAL)}, ("static", "local")),
        ({"variants": (VariantName.UNBALANCED,)}, ("unbalanced",)),
        ({"placement": Path("p.json")}, ()),
    ],
)
def test_live_serves_before_and_after_unless_variants_are_named(
    options: dict[str, object], variants: tuple[str, ...]
) -> None:
    request = resolve_run_request({**options, "live": True}, {})
    assert request.settings.live
    assert request.settings.variants == variants


def test_live_setup_has_traffic_and_passes_of_the_run() -> None:
    settings = RunSettings(live=True, variants=(VariantName.UNBALANCED, VariantName.LOCAL))
    setup = setup_of(settings, 6, 32)
    assert setup.passes == ("unbalanced", "local")
    assert setup.phases == ("python", "chinese", "tables")
    assert setup.switch_steps == (40, 80)
    assert setup.tokens(0) == 1024
    assert [setup.phase(step) for step in (0, 39, 40, 119)] == [0, 0, 1, 2]
