"""One child process that gets the launcher's signals and does not outlive it."""

import ctypes
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from npusim.errors import Refused

FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
AWAITED = frozenset({*FORWARDED, signal.SIGCHLD})
LOOK = 0.2
"""Seconds after which it is looked at without a signal: the kernel may give the word of a child's
end to any thread that lets it in, and one that does not await it drops it."""
SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""
SET_TIMER_SLACK = 29
"""PR_SET_TIMERSLACK of prctl."""
TIMER_SLACK = 500_000
"""Nanoseconds by which sleeps may be prolonged, so that wake-ups coincide. A thread of torch_npu
that frees host memory sleeps for a microsecond at a time, all the time: with the kernel's 50
microseconds, four simulated ranks spend a third of their CPU time on its wake-ups."""


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` to its end; its exit code, or 128 and the signal that ended it.

    Signals that a process sends to this one are passed on. Those of a terminal are not: the
    terminal sends them to the command as well. Raises `Refused` when it cannot be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    try:
        child = _start(command, environment, before)
        _attend(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _start(
    command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals | int]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=environment, preexec_fn=_prepare(mask))
    except OSError as error:
        raise Refused(f"cannot start {command[0]}: {error.strerror}") from error


def _prepare(mask: set[signal.Signals | int]) -> Callable[[], None]:
    """What the child does before the command begins. The library is loaded here, not there."""
    system = ctypes.CDLL(None)

    def prepare() -> None:
        system.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        system.prctl(SET_TIMER_SLACK, TIMER_SLACK, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _attend(child: subprocess.Popen[bytes]) -> None:
    while child.poll() is None:
        received = signal.sigtimedwait(AWAITED, LOOK)
        if received is not None and received.si_signo != signal.SIGCHLD and received.si_pid != 0:
            child.send_signal(received.si_signo)
