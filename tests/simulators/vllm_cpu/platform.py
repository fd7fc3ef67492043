"""The platform: vLLM's CPU with other collectives, another worker, and EPLB if asked for."""

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from vllm_cpu.missing_features import Hole, filled

if TYPE_CHECKING:  # It asks for the platform while it is imported.
    from vllm.config import VllmConfig

STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
WORKER = "vllm_cpu.worker.FilledWorker"
START = "VLLM_WORKER_MULTIPROC_METHOD"
"""How vLLM starts its workers: `fork`, unless a platform says otherwise, or `spawn`."""
OWN = "vllm_cpu"
"""The key of `additional_config` that is ours: `{"vllm_cpu": {"eplb": {...}}}`."""


class FilledCpu(CpuPlatform):
    """`is_cpu()` stays true, so that everything else takes the CPU's paths."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Qualified name of the class that carries collectives."""
        if Hole.COLLECTIVES in filled():
            return "vllm_cpu.collectives.HostCommunicator"
        return str(super().get_device_communicator_cls())

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """What vLLM checks, then our worker in place of the CPU's, and EPLB.

        `VLLM_WORKER_MULTIPROC_METHOD` stays what it was: the CPU's platform always spawns workers,
        which costs an import of vLLM each. A worker with one OpenMP thread can be forked.
        """
        method = os.environ.get(START)
        super().check_and_update_config(vllm_config)
        if method is not None:
            os.environ[START] = method
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == STOCK_WORKER:
            parallel.worker_cls = WORKER
        if Hole.EPLB_SWITCH in filled():
            switch_eplb(vllm_config)


def switch_eplb(vllm_config: "VllmConfig") -> None:
    """Turn EPLB on, where `additional_config` has settings for it.

    The hole: a validator of `ParallelConfig` refuses `enable_eplb` on every platform that is not
    CUDA, ROCm or XPU, before a platform is asked (vLLM issue 49702 asks for a hook). What that
    validator also demands, a group of more than one rank, holds here or the run ends.
    """
    from vllm.config.parallel import EPLBConfig

    settings = own_settings(vllm_config).get("eplb")
    if settings is None:
        return
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if not parallel.enable_expert_parallel or ranks < 2:
        raise ValueError("EPLB needs expert parallelism over two ranks or more")
    parallel.enable_eplb = True
    parallel.eplb_config = EPLBConfig(**{"communicator": "torch_gloo", **settings})


def own_settings(vllm_config: "VllmConfig") -> dict[str, Any]:
    """Our part of `additional_config`."""
    additional = vllm_config.additional_config
    settings = additional.get(OWN, {}) if isinstance(additional, dict) else {}
    return dict(settings)
