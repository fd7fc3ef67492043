"""`equipoise run --live` on a terminal of its own: a pseudo-terminal."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from helpers.paths import SEARCH_PATH
from helpers.processes.process_state import alive
from helpers.processes.run_command import workers

pytestmark = pytest.mark.timeout(900)
TABLES = str(files("equipoise.demo").joinpath("text", "tables.txt"))
SHORT = ("--ranks", "2", "--slots", "34", "--text", TABLES, "--variants", "unbalanced", "exact",
         "--window-size", "2", "--step-interval", "2")  # fmt: skip
"""On two ranks experts move in the first rebalances."""
ENTER, LEAVE = "\033[?1049h", "\033[?25h\033[?1049l"
PATIENCE = 200.0
"""Seconds; only a hang takes so long."""


class LiveRun:
    """A run under a pseudo-terminal, and what it has written there."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24) -> None:
        self._screen, self._terminal = os.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.settings = termios.tcgetattr(self._terminal)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "equipoise", "run", "--live", *arguments],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": SEARCH_PATH, "TERM": "xterm-256color",
                 "PYTHONIOENCODING": "utf-8", "NO_COLOR": ""},
        )  # fmt: skip
        self.text = ""

    def read_until(self, seen: Callable[[str], bool]) -> None:
        """Reads on until `seen` holds of all that was written, or the run has ended."""
        expiry = time.monotonic() + PATIENCE
        while not seen(self.text):
            assert time.monotonic() < expiry, self.text[-3000:]
            if select.select([self._screen], [], [], 0.1)[0]:
                self.text += os.read(self._screen, 65536).decode(errors="replace")
            elif self.process.poll() is not None:
                return

    def finish(self) -> int:
        """Reads to the end; returns the exit code."""
        self.read_until(lambda _: False)
        return self.process.wait(PATIENCE)

    def after_screen(self) -> list[str]:
        """The lines behind the restored screen."""
        return self.text.rpartition(LEAVE)[2].replace("\r", "").splitlines()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        os.close(self._screen)
        os.close(self._terminal)

    @property
    def terminal_settings(self) -> list[object]:
        return termios.tcgetattr(self._terminal)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LiveRun]]:
    runs: list[LiveRun] = []

    def begin(*arguments: str) -> LiveRun:
        runs.append(LiveRun(*SHORT, *arguments, "--out", str(tmp_path)))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def assert_restored(run: LiveRun) -> None:
    assert run.text.count(ENTER) == run.text.count(LEAVE) == 1
    assert run.text.index(ENTER) < run.text.index(LEAVE)
    assert "\033[?1049" not in "".join(run.after_screen())
    assert run.terminal_settings == run.settings


def test_live_run_restores_terminal_then_prints_the_table(start: Callable[..., LiveRun]) -> None:
    run = start("--steps", "16", "--log-rebalances")
    code = run.finish()
    assert code in (0, 1), run.text[-3000:]  # 1: too few rebalances on a slow machine
    assert_restored(run)
    shown = run.text[run.text.index(ENTER) : run.text.index(LEAVE)]
    for words in (
        "all others wait",
        "nothing is balanced",
        "Equipoise moves experts",
        "while serving",
        "weights moved",
        "outputs must be identical",
    ):
        assert words in shown
    assert re.search(r"layer \d+ expert \d+: rank \d → rank \d", shown)
    after = run.after_screen()
    assert "outputs identical: yes" in after[-1]
    # Lines of ranks are caught while the screen is up, and written behind it.
    assert any("equipoise.rebalances engine=exact rebalance=1" in line for line in after)


def test_live_run_interrupted_restores_terminal_and_ends_ranks(
    start: Callable[..., LiveRun],
) -> None:
    run = start("--steps", "2000")
    run.read_until(lambda text: "all others wait" in text)
    ranks = workers(run.process.pid)
    assert len(ranks) == 2
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130
    assert_restored(run)
    assert run.after_screen()[-1] == "equipoise: interrupted"
    assert not any(alive(rank) for rank in ranks)


def test_live_run_that_loses_a_rank_restores_terminal_and_names_it(
    start: Callable[..., LiveRun],
) -> None:
    run = start("--steps", "2000")
    run.read_until(lambda text: "all others wait" in text)
    os.kill(workers(run.process.pid)[1], signal.SIGKILL)
    assert run.finish() == 3
    assert_restored(run)
    last = run.after_screen()[-1]
    assert last.startswith("equipoise: error: rank 1 was killed by SIGKILL")
