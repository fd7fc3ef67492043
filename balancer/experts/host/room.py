"""How much more memory this process may take, before the system kills somebody for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """Bytes that can be had, and whose limit that is, for an error."""

    free: int
    whose: str


def room(proc: Path = PROC, groups: Path = GROUPS) -> Room:
    """The tightest limit: of the machine, and of each control group that this process is in.

    Shared memory counts as used by whoever touches it first, and a control group that is full kills
    a process of its own; nobody is told before. A limit of /dev/shm does not count: the pool has
    no name there.
    """
    found = [_machine(proc), *_groups(proc, groups)]
    return min(found, key=lambda limit: limit.free)


def _machine(proc: Path) -> Room:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return Room(int(rest.split()[0]) << 10, "this machine's memory")
    raise ValueError(f"{proc / 'meminfo'} does not say what is available")


def _groups(proc: Path, groups: Path) -> Iterator[Room]:
    """Limits of either version of control groups, from the process's own to the root."""
    for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, used, spare = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder = groups / "memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            spare = "total_inactive_file"
        else:
            continue
        place = folder / path.lstrip("/")
        while True:
            yield from _group(place, limit, used, spare)
            if place == folder:
                break
            place = place.parent


def _group(place: Path, limit: str, used: str, spare: str) -> Iterator[Room]:
    """Nothing where there is no limit, or no such folder: a container sees its own as the root."""
    try:
        most = (place / limit).read_text(encoding="ascii").strip()
        taken = int((place / used).read_text(encoding="ascii"))
        stat = (place / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return
    if most == "max":
        return
    # Pages of files that nobody used lately are given up before anybody is killed.
    given_up = next((int(v) for k, v in map(str.split, stat.splitlines()) if k == spare), 0)
    yield Room(max(0, int(most) - taken + given_up), f"control group {place}")
