"""A vllm-ascend that has a worker, and nothing else; as modules, for one test."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class NPUWorker:
    """Notes what is done with it, in order."""

    def __init__(
        self,
        vllm_config: Any,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vllm_config = vllm_config
        self.done = ["init"]

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self.done.append("init_device")

    def shutdown(self) -> None:
        self.done.append("shutdown")


@contextmanager
def ascend(built_for: str = "A2", **attributes: Any) -> Iterator[None]:
    """`vllm_ascend.worker.worker` with a worker, importable within; `attributes` beside it."""
    fake_modules = {
        name: ModuleType(name)
        for name in (
            "vllm_ascend",
            "vllm_ascend.worker",
            "vllm_ascend.worker.worker",
            "vllm_ascend._build_info",
        )
    }
    vars(fake_modules["vllm_ascend.worker.worker"]).update({"NPUWorker": NPUWorker, **attributes})
    vars(fake_modules["vllm_ascend._build_info"])["__device_type__"] = built_for
    for name, module in fake_modules.items():
        vars(module)["__path__"] = []
        if "." in name:
            setattr(fake_modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    try:
        sys.modules.update(fake_modules)
        yield
    finally:
        for name in fake_modules:
            del sys.modules[name]
