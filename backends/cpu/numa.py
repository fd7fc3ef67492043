"""Which NUMA node this process runs on, as the system lists it."""

import os
from pathlib import Path

from equipoise.hal.numa import NODES, UNKNOWN, listed_cpus


def numa_node(root: Path = NODES) -> int:
    """The node that has all processors on which this process may run; `UNKNOWN` where none has.

    Args:
        root: where the kernel lists nodes; what cannot be read there is passed over.
    """
    for folder in sorted(root.glob("node[0-9]*")):
        node = int(folder.name.removeprefix("node"))
        if os.sched_getaffinity(0) <= _cpus(node, root):
            return node
    return UNKNOWN


def _cpus(node: int, root: Path) -> frozenset[int]:
    """None where they cannot be read."""
    try:
        return listed_cpus(node, root)
    except (OSError, ValueError):
        return frozenset()
