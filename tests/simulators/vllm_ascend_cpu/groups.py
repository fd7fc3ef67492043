"""Process groups of vLLM, as vllm-ascend makes them, over gloo."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import monitored_barrier

from vllm_ascend_cpu import stand_ins

stand_ins.install()

import vllm_ascend.worker.worker  # noqa: E402, F401 - it replaces the class of groups
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm_ascend import ascend_config  # noqa: E402

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Place:
    """One rank's place.

    Attributes:
        rank: of the run.
        size: of the run.
        address: a file where the ranks meet, as a URL.
        stages: that the ranks are divided into; each has the same number of ranks.
    """

    rank: int
    size: int
    address: str
    stages: int = 1


@contextmanager
def groups(place: Place, **additional: Any) -> Iterator[VllmConfig]:
    """The groups of a run, until the context ends; `additional` is `additional_config`."""
    config = configuration(place, additional)
    ascend_config._ASCEND_CONFIG = SimpleNamespace(
        msmonitor_use_daemon=False,
        enable_flashcomm1=False,
        ascend_compilation_config=None,
        eplb_config=None,
    )
    with set_current_vllm_config(config):
        try:
            _open(place)
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def meet() -> None:
    """Every rank of the run is here."""
    world = parallel_state.get_world_group()
    monitored_barrier(group=world.cpu_group, timeout=TIMEOUT)


def configuration(place: Place, additional: Any) -> VllmConfig:
    """Of an engine whose ranks are divided so."""
    parallel = ParallelConfig(
        pipeline_parallel_size=place.stages, tensor_parallel_size=place.size // place.stages
    )
    return VllmConfig(
        parallel_config=parallel,
        device_config=DeviceConfig("cpu"),
        additional_config=additional,
    )


def _open(place: Place) -> None:
    parallel_state.init_distributed_environment(
        world_size=place.size,
        rank=place.rank,
        local_rank=place.rank,
        distributed_init_method=place.address,
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=place.size // place.stages,
        pipeline_model_parallel_size=place.stages,
        backend="gloo",
    )
