"""Cases for a pool of ranks: what is said where vllm-ascend is not as it was tested."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from vllm.distributed import parallel_state
from vllm.distributed.eplb.policy import EPLB_POLICIES
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_ascend.eplb.core.policy.policy_factory import PolicyFactory

from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import EquipoiseError
from equipoise.integrations.vllm.entry import ORIGINAL_ATTRIBUTE
from equipoise.integrations.vllm_ascend import doctor
from vllm_ascend_cpu.groups import Place, groups
from vllm_ascend_cpu.runner import Runner
from vllm_ascend_cpu.workers import worker

Break = Callable[[], AbstractContextManager[Any]]
PLANNER = "vllm_ascend.eplb.core.eplb_worker"
BREAKS: dict[str, Break] = {
    "nothing": lambda: patch("os.sep", "/"),
    "version": lambda: patch(
        "equipoise.integrations.vllm.compatibility.version", lambda _: "0.24.0"
    ),
    "missing": lambda: patch(f"{PLANNER}.EplbWorker", object),
    "signature": lambda: patch(
        "vllm_ascend.patch.worker.patch_distributed.GroupCoordinatorPatch.isend_tensor_dict",
        lambda self, tensors: None,
    ),
    "family": lambda: patch("vllm_ascend._build_info.__device_type__", "_310P"),
}


def refused(fabric: Fabric, address: str, broken: str, parts: dict[str, Any]) -> dict[str, Any]:
    """The error that a worker ends with, and what of ours is in vllm-ascend behind it.

    Args:
        fabric: of the case.
        address: see `Place`.
        broken: key of `BREAKS`.
        parts: that are switched on.
    """
    rank, size = fabric.control.rank, fabric.control.size
    own = {"equipoise": parts, "eplb_config": {"dynamic_eplb": True}}
    with groups(Place(rank, size, address, stages=size), **own) as config:
        with BREAKS[broken]():
            error_text = _error_text(config, rank)
        stages = parallel_state.get_pp_group()
        return {
            "said": error_text,
            "left": [
                hasattr(PolicyFactory.generate_policy, ORIGINAL_ATTRIBUTE),
                hasattr(EPLB_POLICIES["default"], ORIGINAL_ATTRIBUTE),
                "isend_tensor_dict" in vars(stages),
            ],
        }


def looked_at(fabric: Fabric, address: str) -> dict[str, tuple[bool | None, str]]:
    """What `equipoise doctor --vllm-ascend` says, but for what depends on how we are installed."""
    findings = {what: (so, detail) for what, so, detail in doctor.examine()}
    findings.pop("plugin")
    return findings


def resolved(fabric: Fabric, address: str, name: str) -> list[str]:
    """The worker's class that vLLM finds by a name, and what it is derived from."""
    worker_class: type = resolve_obj_by_qualname(name)
    return [f"{each.__module__}.{each.__qualname__}" for each in worker_class.__mro__]


def _error_text(config: Any, rank: int) -> str:
    try:
        with worker(config, rank, lambda *_: Runner(0, 1)):
            return ""
    except EquipoiseError as error:
        return f"{type(error).__name__}: {error}"
