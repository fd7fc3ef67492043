"""SIGTERM and SIGHUP end a run as Ctrl-C does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.process import SIGNALS, TerminatedBySignal, raise_on_signal
from equipoise.demo import launcher

EQUIPOISE = (sys.executable, "-m", "equipoise")
TIMEOUT_S = 200.0


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_terminates_run_after_cleanup_with_one_line(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    signals = []

    def serve(*_: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            # A second one, while cleaning up, changes nothing.
            signal.raise_signal(number)
            signals.append(number)

    monkeypatch.setattr(launcher, "run_demo", serve)
    answer = equipoise("run", "--quiet")
    assert answer.code == 128 + number
    assert answer.err == f"equipoise: terminated by {number.name}\n"
    assert signals == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_terminable_keeps_ignored_signal_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_signal():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_terminable_outside_main_thread_keeps_signal_handlers() -> None:
    handlers: list[object] = []

    def enter() -> None:
        with raise_on_signal():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(TIMEOUT_S)
    assert handlers == [signal.SIG_DFL]


def test_terminated_is_not_an_exception_subclass() -> None:
    assert not issubclass(TerminatedBySignal, Exception)


@pytest.mark.slow
def test_terminated_run_leaves_no_temporary_folder(tmp_path: Path) -> None:
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    program = subprocess.Popen(
        [
            *EQUIPOISE,
            "run",
            "--ranks",
            "1",
            "--steps",
            "100000",
            "--variants",
            "unbalanced",
            "--quiet",
        ],
        cwd=here,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # A folder, not the file by which `tempfile` tries whether it can write there.
        _wait_for(lambda: any(map(Path.is_dir, temporary.iterdir())) or program.poll() is not None)
        program.terminate()
        _, stderr = program.communicate(timeout=TIMEOUT_S)
    finally:
        program.kill()
    assert (program.returncode, stderr) == (143, "equipoise: terminated by SIGTERM\n")
    assert list(temporary.iterdir()) == []


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
