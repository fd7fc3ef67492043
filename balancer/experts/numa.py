"""Which processors are near an accelerator, and how many threads may copy for it there."""

import os
from pathlib import Path

from equipoise.hal.errors import CopierError
from equipoise.hal.numa import NODES, UNKNOWN, cpulist, listed_cpus

LEAST, MOST = 4, 16


def cpus_of(node: int, root: Path = NODES) -> frozenset[int]:
    """Processors of NUMA node `node`; none where it is `UNKNOWN`.

    Raises:
        CopierError: the system does not list that node, or in a form that is not known.
    """
    if node == UNKNOWN:
        return frozenset()
    try:
        return listed_cpus(node, root)
    except (OSError, ValueError) as error:
        path = cpulist(node, root)
        raise CopierError(f"NUMA node {node}: cannot read {path}: {error}") from error


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
