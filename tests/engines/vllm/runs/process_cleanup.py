"""Nothing of a run outlives it: no process that vLLM started, and no shared memory of theirs."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from helpers.processes.shared_memory import mapped

VARIABLE = "EQUIPOISE_VLLM_RUN"
"""Set anew for each run, and inherited by all its processes: by it they are found."""
GRACE = 0.5
"""Seconds for stacks to be printed."""


def end_with_parent() -> None:
    """End this run with all its processes when standard input is closed: the parent has died."""

    def watch() -> None:
        # Not through sys.stdin: its lock could not be taken when the interpreter ends.
        while os.read(sys.stdin.fileno(), 1):
            pass
        try:
            kin = Kin(os.environ.get(VARIABLE, ""), os.getpid())
            segments = segments_of(kin) | mapped([Path("/proc/self/maps")])
            end_all(kin)
            remove_unused(segments, besides=os.getpid())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="orphans").start()


@dataclass(frozen=True)
class Kin:
    """The processes of one run.

    Attributes:
        mark: value of `EQUIPOISE_VLLM_RUN`.
        leader: the first process, with which the system keeps all that it starts (setsid); None
            before there is one.
    """

    mark: str
    leader: int | None = None

    @property
    def alive(self) -> list[int]:
        """Ids of those that live, never of this process.

        A process that gives itself a title, as those of vLLM do, writes it over its environment:
        then its leader tells that it belongs here. One that leads others itself has the mark.
        """
        process_ids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
        return sorted(pid for pid in process_ids if pid != os.getpid() and self._has(pid))

    def _has(self, pid: int) -> bool:
        mark = f"{VARIABLE}={self.mark}\0".encode()
        try:
            state, leader = _state(pid)
            environment = Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
        except OSError:
            return False
        return state != "Z" and (leader == self.leader or mark in environment)


def _state(pid: int) -> tuple[str, int]:
    """State and leader, which follow a name in parentheses that may hold anything."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return words[0], int(words[3])


def end_all(kin: Kin, timeout: float = 20.0) -> list[int]:
    """Kill what is left of a run; ids of what was left. Raises `TimeoutError` where it stays."""
    remaining = kin.alive
    until = time.monotonic() + timeout
    while pids := kin.alive:
        _send(pids, signal.SIGKILL)
        if time.monotonic() > until:
            raise TimeoutError(f"processes {pids} do not end")
        time.sleep(0.05)
    return remaining


def tell_stacks(kin: Kin) -> None:
    """Let every process print where its threads are, and die of it (with PYTHONFAULTHANDLER)."""
    _send(kin.alive, signal.SIGABRT)
    time.sleep(GRACE)


def segments_of(kin: Kin) -> set[Path]:
    """Shared memory that processes of a run have mapped now.

    vLLM unlinks its own when it ends in order; what is killed leaves it in the system.
    """
    return mapped(Path(f"/proc/{pid}/maps") for pid in kin.alive)


def remove_unused(segments: set[Path], besides: int = 0) -> list[Path]:
    """Remove those that no process maps, or `besides` alone; what was removed."""
    others = (
        maps for maps in Path("/proc").glob("[0-9]*/maps") if maps.parent.name != str(besides)
    )
    segments_without_user = segments - mapped(others)
    segments_removed = sorted(path for path in segments_without_user if path.exists())
    for path in segments_removed:
        path.unlink(missing_ok=True)
    return segments_removed


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
