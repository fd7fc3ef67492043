"""The command as a child: its exit code, its signals, its end."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers.paths import SEARCH_PATH
from helpers.processes.process_state import alive
from npusim import process
from npusim.errors import Refused

LIMIT = 20.0
PARENT = """
import sys
from npusim import process
sys.exit(process.run(sys.argv[1:], {}))
"""
CATCHING = "trap 'echo caught; exit 9' {name}; echo ready; while :; do sleep 0.02; done"


def parent(*command: str) -> "subprocess.Popen[str]":
    """A process that runs `command` as the launcher does."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, *command],
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        stdout=subprocess.PIPE,
        text=True,
    )


def line(of: "subprocess.Popen[str]") -> str:
    """The next line it prints."""
    assert of.stdout is not None
    return of.stdout.readline().strip()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -SEGV $$", 139), ("kill $$", 143)]
)
def test_child_exit_code_follows_shell_convention(script: str, code: int) -> None:
    assert process.run(["/bin/sh", "-c", script], {}) == code


def test_child_exit_is_seen_when_another_thread_takes_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child ends before it is awaited; a thread that lets the signal in drops it."""
    awaiting, over = signal.sigtimedwait, threading.Event()

    def late(numbers: frozenset[int], seconds: float) -> object:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        time.sleep(0.05)
        return awaiting(numbers, seconds)

    monkeypatch.setattr(signal, "sigtimedwait", late)
    other = threading.Thread(target=over.wait, args=(LIMIT,))
    other.start()
    try:
        assert process.run(["/bin/sh", "-c", "sleep 0.1; exit 7"], {}) == 7
    finally:
        over.set()
        other.join(LIMIT)


def test_child_that_cannot_start_is_refused_in_one_line() -> None:
    with pytest.raises(Refused, match=r"^cannot start /no/such/program: No such file"):
        process.run(["/no/such/program"], {})


def test_child_run_restores_signal_mask() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert process.run(["/bin/true"], {}) == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1"])
def test_child_receives_forwarded_signal(name: str) -> None:
    with parent("/bin/sh", "-c", CATCHING.format(name=name)) as running:
        assert line(running) == "ready"
        running.send_signal(getattr(signal, f"SIG{name}"))
        assert line(running) == "caught"
        assert running.wait(LIMIT) == 9


def test_child_ends_when_launcher_is_killed() -> None:
    with parent("/bin/sh", "-c", "echo $$; while :; do sleep 0.02; done") as running:
        child = int(line(running))
        running.kill()
        running.wait(LIMIT)
    expiry = time.monotonic() + LIMIT
    while alive(child) and time.monotonic() < expiry:
        time.sleep(0.02)
    assert not alive(child)
