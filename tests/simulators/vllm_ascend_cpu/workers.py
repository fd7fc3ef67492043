"""The worker, ours over vllm-ascend's, with what needs a device replaced."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm_ascend.worker import worker as theirs

from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm_ascend import Worker

MakeRunner = Callable[..., Any]


@contextmanager
def counting() -> Iterator[Callable[[Any], dict[str, int]]]:
    """What a worker says that it has counted, without what was counted in the process before."""
    before = COUNTERS.read()
    yield lambda ascend_worker: {
        name: count - before[name] for name, count in ascend_worker.equipoise_counters().items()
    }


def _init(
    self: Any,
    vllm_config: VllmConfig,
    local_rank: int,
    rank: int,
    distributed_init_method: str,
    is_driver_worker: bool = False,
    **kwargs: Any,
) -> None:
    """What of `NPUWorker.__init__` is read later; the rest asks for a model and a device."""
    self.vllm_config, self.parallel_config = vllm_config, vllm_config.parallel_config
    self.model_config = SimpleNamespace(dtype=torch.bfloat16)
    self.local_rank, self.rank = local_rank, rank
    self.use_v2_model_runner = False
    self.profiler = None
    self._pp_send_work = []


def _device(self: Any) -> torch.device:
    """The worker sets its device, and nobody has touched it before."""
    assert not torch.npu.mock_calls, torch.npu.mock_calls  # type: ignore[attr-defined]
    return torch.device("cpu")


@contextmanager
def worker(config: VllmConfig, rank: int, make_runner: MakeRunner) -> Iterator[Any]:
    """A worker that has its device, until the context ends."""
    with ExitStack() as replaced:
        for name, instead in (
            ("NPUWorker.__init__", _init),
            ("NPUWorker._init_device", _device),
            ("NPUModelRunner", make_runner),
            ("report_usage_stats", lambda *_: None),
        ):
            replaced.enter_context(patch(f"{theirs.__name__}.{name}", instead))
        ascend_worker = Worker(config, rank, rank, "", is_driver_worker=rank == 0)
        torch.npu.reset_mock()  # type: ignore[attr-defined]
        try:
            ascend_worker.init_device()
            yield ascend_worker
        finally:
            ascend_worker.shutdown()
