"""What vLLM calls: once where it looks for a platform, and once in each of its processes."""

import time

from vllm_cpu.faults import plant, planted
from vllm_cpu.missing_features import Hole, filled
from vllm_cpu.runner import stand_in_for_backend
from vllm_cpu.vllm_counters import watch_all

NAP = 0.0005
"""Seconds between two looks into a queue of messages; a step of a test's model takes far longer."""


def platform() -> str | None:
    """The class of the platform, where holes are to be filled; else vLLM's own stays.

    vLLM swallows what is raised here, so that a wrong name is told by `prepare`.
    """
    holes = filled()
    if Hole.RUNNER in holes:
        stand_in_for_backend()
    return "vllm_cpu.platform.FilledCpu" if holes else None


def prepare() -> None:
    """Watch this process, and plant a fault in it, where that is asked for.

    Raises `ValueError` for an unknown hole or fault, which ends the process. Holes are filled by
    the platform and by the worker.
    """
    if filled():
        sleep_where_vllm_spins()
    watch_all()
    plant(planted())


def sleep_where_vllm_spins() -> None:
    """Let who waits for a message between processes sleep for `NAP`, and leave the core to others.

    vLLM yields instead, in a loop: where ranks are more than cores, half of a run is this loop.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(NAP)
