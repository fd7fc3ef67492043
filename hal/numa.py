"""Which processors the system lists as those of a NUMA node."""

from pathlib import Path

NODES = Path("/sys/devices/system/node")
UNKNOWN = -1
"""What `Topology.numa` says where nobody knows, or where it is more than one."""


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
