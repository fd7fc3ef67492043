"""Cases for a pool of ranks: stages of a pipeline, each a worker of vllm-ascend's."""

from typing import Any

from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import EquipoiseError
from vllm_ascend_cpu.faults import Fault, planted
from vllm_ascend_cpu.groups import Place, groups, meet
from vllm_ascend_cpu.runner import Runner, Step
from vllm_ascend_cpu.workers import counting, worker


def execute(
    fabric: Fabric,
    address: str,
    steps: list[int],
    parts: dict[str, Any],
    fault: str = Fault.NONE,
) -> dict[str, Any]:
    """Every stage executes the steps, given by their rows; what it saw.

    Args:
        fabric: of the case; vLLM's groups are others, among the same ranks.
        address: see `Place`.
        steps: to execute.
        parts: that are switched on.
        fault: name of a `Fault`.
    """
    rank, size = fabric.control.rank, fabric.control.size
    handles: list[list[str]] = []
    with (
        groups(Place(rank, size, address, stages=size), equipoise=parts) as config,
        counting() as read_counts,
        worker(config, rank, lambda *_: Runner(rank, size)) as ascend_worker,
    ):
        with planted(Fault(fault)):
            error = _steps(
                ascend_worker, [Step(at, rows) for at, rows in enumerate(steps)], handles
            )
        meet()  # who shut down at once would take what is still on its way along
        runner = ascend_worker.model_runner
        facts = {name: getattr(runner, name) for name in ("right", "finite", "early", "absent")}
        return {**facts, "handles": handles, "raised": error, "counted": read_counts(ascend_worker)}


def _steps(ascend_worker: Any, steps: list[Step], handles: list[list[str]]) -> str:
    """What has ended the stage before its last step; empty if nothing has.

    `handles` get, by step, where those come from that the worker will wait for in its next step.
    """
    try:
        for step in steps:
            assert ascend_worker.execute_model(step) is None
            modules = [type(handle).__module__ for handle in ascend_worker._pp_send_work]
            handles.append([module.partition(".")[0] for module in modules])
    except EquipoiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""
