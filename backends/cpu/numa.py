"""Which NUMA node this process runs on, as the system lists it."""

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")
UNKNOWN = -1
"""What `Topology.numa` says where nobody knows, or where it is more than one."""


def numa_node(root: Path = NODES) -> int:
    """The node that has all processors on which this process may run; `UNKNOWN` where none has.

    Args:
        root: where the kernel lists nodes; what cannot be read there is passed over.
    """
    for folder in sorted(root.glob("node[0-9]*")):
        if os.sched_getaffinity(0) <= _cpus(folder / "cpulist"):
            return int(folder.name.removeprefix("node"))
    return UNKNOWN


def _cpus(path: Path) -> set[int]:
    """What the kernel writes as `0-3,8,10-11`; none where it cannot be read."""
    cpus: set[int] = set()
    try:
        for part in filter(None, path.read_text(encoding="ascii").strip().split(",")):
            first, dash, last = part.partition("-")
            cpus.update(range(int(first), int(last if dash else first) + 1))
    except (OSError, ValueError):
        return set()
    return cpus
