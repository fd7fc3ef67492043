"""NUMA nodes as Linux lists them: the node of this process, and the processors of a node."""

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")
UNKNOWN_NODE = -1
"""`Topology.numa` where the node is unknown, or is more than one."""


def cpulist(node: int, root: Path = NODES) -> Path:
    """The file that lists them."""
    return root / f"node{node}" / "cpulist"


def listed_cpus(node: int, root: Path = NODES) -> frozenset[int]:
    """Processors of a node. Raises `OSError`, or `ValueError` for a form that is not known."""
    return parse_cpus(cpulist(node, root).read_text(encoding="ascii"))


def parse_cpus(text: str) -> frozenset[int]:
    """What the kernel writes as `0-3,8,10-11`. Raises `ValueError`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)


def numa_node(root: Path = NODES) -> int:
    """The node that has all processors on which this process may run, or `UNKNOWN_NODE`.

    Args:
        root: where the kernel lists nodes; what cannot be read there is passed over.
    """
    for folder in sorted(root.glob("node[0-9]*")):
        node = int(folder.name.removeprefix("node"))
        if os.sched_getaffinity(0) <= _cpus(node, root):
            return node
    return UNKNOWN_NODE


def _cpus(node: int, root: Path) -> frozenset[int]:
    """None where they cannot be read."""
    try:
        return listed_cpus(node, root)
    except (OSError, ValueError):
        return frozenset()
