"""What vLLM calls: once where it looks for a platform, and once in each of its processes."""

from vllm_cpu.faults import plant, planted
from vllm_cpu.missing_features import Hole, filled
from vllm_cpu.runner import stand_in_for_backend
from vllm_cpu.vllm_counters import watch_all


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
    filled()
    watch_all()
    plant(planted())
