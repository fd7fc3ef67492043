"""Which processors are near an accelerator, and how many threads may copy for it there."""

import os
from pathlib import Path

from equipoise.hal.errors import CopierError

NODES = Path("/sys/devices/system/node")
UNKNOWN = -1
"""What `Topology.numa` says where nobody knows."""
LEAST, MOST = 4, 16


def cpus_of(node: int, root: Path = NODES) -> frozenset[int]:
    """Processors of NUMA node `node`; none where it is `UNKNOWN`.

    Raises:
        CopierError: the system does not list that node, or in a form that is not known.
    """
    if node == UNKNOWN:
        return frozenset()
    path = root / f"node{node}" / "cpulist"
    try:
        return parse_cpus(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise CopierError(f"NUMA node {node}: cannot read {path}: {error}") from error


def parse_cpus(text: str) -> frozenset[int]:
    """What the kernel writes as `0-3,8,10-11`. Raises `ValueError`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)


def available_cpus() -> frozenset[int]:
    """Processors that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def near_cpus(node: int, allowed: frozenset[int], root: Path = NODES) -> frozenset[int]:
    """Where to pin what copies for an accelerator at `node`; none for anywhere in `allowed`.

    A container may be kept off the accelerator's node: then far processors are better than none.
    """
    return cpus_of(node, root) & allowed


def thread_count(cpus: int, accelerators: int) -> int:
    """Threads that copy for one of `accelerators` which share `cpus` processors.

    Half of its part of the processors, between 4 and 16, as TensorRT-LLM's copy pool; but never
    more than there are, because a copy by threads that take turns is slower than by fewer.
    """
    if cpus < 1 or accelerators < 1:
        raise CopierError(f"no threads for {accelerators} accelerators on {cpus} processors")
    return min(cpus, MOST, max(LEAST, cpus // accelerators // 2))
