"""Equipoise inside vllm-ascend; see docs/vllm-ascend.md.

`--worker-cls equipoise.integrations.vllm_ascend.Worker` selects our worker. The class is created at
its first use, since its base imports torch_npu, which must not happen in a process without a
device.
"""

from typing import Any

from equipoise.integrations.vllm_ascend.config_check import prepare

__all__ = ["prepare"]


def __getattr__(name: str) -> Any:
    """Return the worker class. Raises `EngineUnsupported` if its base cannot be imported."""
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.integrations.vllm_ascend.worker import worker_class

    return worker_class()
