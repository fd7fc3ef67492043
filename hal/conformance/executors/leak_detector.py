"""What a process holds of the operating system, and what it has leaked (clause R1)."""

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from equipoise.hal.errors import Violation

SETTLE_TIMEOUT = 5.0
"""Seconds that threads and connections may take to end after everything was closed."""
POLL_INTERVAL = 0.01
MAX_MEMORY_GROWTH = 128 << 20
"""Bytes that a process may grow by over all its cases: allocators and caches keep some."""
SHM_PREFIX = "/dev/shm/"


@dataclass(frozen=True)
class ProcessUsage:
    """Resources of a process.

    Attributes:
        thread_names: name of each thread, as Python calls it if Python knows the thread.
        descriptor_targets: file of each descriptor; for those without a name the kind.
        memory: resident bytes.
        shm_names: names in shared memory.
    """

    thread_names: tuple[str, ...]
    descriptor_targets: tuple[str, ...]
    memory: int
    shm_names: frozenset[str]

    @property
    def threads(self) -> int:
        """How many."""
        return len(self.thread_names)

    @property
    def descriptors(self) -> int:
        """How many."""
        return len(self.descriptor_targets)

    def excess_over(self, base: "ProcessUsage") -> str:
        """What it holds beyond `base`, as text; empty when it holds no more."""
        threads = _more(self.thread_names, base.thread_names)
        descriptors = _more(self.descriptor_targets, base.descriptor_targets)
        counts = {
            f"threads ({threads})": self.threads - base.threads,
            f"descriptors ({descriptors})": self.descriptors - base.descriptors,
            "names in shared memory": len(self.shm_names - base.shm_names),
            "bytes of memory": (self.memory - base.memory) // MAX_MEMORY_GROWTH * MAX_MEMORY_GROWTH,
        }
        return ", ".join(f"{count} more {kind}" for kind, count in counts.items() if count > 0)


def _more(now: Iterable[str], before: Iterable[str]) -> str:
    """What there is more of, with counts."""
    excess = Counter(now) - Counter(before)
    return ", ".join(f"{count} x {name}" for name, count in sorted(excess.items()))


def process_usage() -> ProcessUsage:
    """Measure this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    # Up to CPython 3.13 the system calls every thread of Python's by the name of the process.
    python_names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    tasks = {path.parent.name: _text(path) for path in Path("/proc/self/task").glob("*/comm")}
    return ProcessUsage(
        thread_names=tuple(python_names.get(task, name) for task, name in tasks.items() if name),
        descriptor_targets=tuple(
            name for name in map(_target, os.listdir("/proc/self/fd")) if name
        ),
        memory=pages * os.sysconf("SC_PAGE_SIZE"),
        shm_names=_mapped_shm_names(),
    )


def _text(path: Path) -> str:
    """Contents of the file; empty when it no longer exists."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _target(descriptor: str) -> str:
    """A name, or a kind such as socket; empty for the descriptor of the listing itself."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]
    except OSError:
        return ""


def all_threads_stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped or ended."""
    return all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").glob("*/stat"))


@dataclass
class LeakDetector:
    """Compares the resources of an idle process with those when it was idle first.

    The first use of everything is part of the baseline: libraries start threads once for all.
    """

    measure: Callable[[], ProcessUsage] = process_usage
    baseline: ProcessUsage | None = None
    seen_shm_names: set[str] = field(default_factory=set)
    _growth_expected: bool = False

    def note_shm_names(self) -> None:
        """Record the names in shared memory, while they are in use."""
        self.seen_shm_names |= self.measure().shm_names

    def expect_growth(self) -> None:
        """Accept memory growth of a case with real sizes: allocators keep memory for reuse."""
        self._growth_expected = True

    def check_released(self, timeout: float = SETTLE_TIMEOUT) -> None:
        """Compare with the baseline, after everything was closed. Raises `Violation` of R1."""
        if self.baseline is None:
            gc.collect()
            self.baseline = self.measure()
            return
        if self._growth_expected:
            gc.collect()
            self.baseline = replace(
                self.baseline, memory=max(self.baseline.memory, self.measure().memory)
            )
            self._growth_expected = False
        expiry = time.monotonic() + timeout
        while excess := self._excess(self.baseline):
            late = time.monotonic() >= expiry  # before collecting, which may take seconds
            gc.collect()  # an error and the frames it came through hold each other
            if late and (excess := self._excess(self.baseline)):
                raise Violation("R1", f"after everything was closed there are {excess}")
            time.sleep(POLL_INTERVAL)

    def _excess(self, base: ProcessUsage) -> str:
        names = sorted(
            name for name in self.seen_shm_names - base.shm_names if os.path.exists(name)
        )
        text = f"the names {', '.join(names)} left in shared memory" if names else ""
        return ", ".join(filter(None, (self.measure().excess_over(base), text)))


def _state(stat: Path) -> str:
    """One letter; "X" when the thread has ended by now."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _mapped_shm_names() -> frozenset[str]:
    """Names in shared memory that are mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped_paths = {
        line.partition("/")[1] + line.partition("/")[2] for line in lines if SHM_PREFIX in line
    }
    return frozenset(name for name in mapped_paths if not name.endswith("(deleted)"))
