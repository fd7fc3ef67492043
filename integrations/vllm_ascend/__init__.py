"""Equipoise inside vllm-ascend; see docs/vllm-ascend.md.

`--worker-cls equipoise.integrations.vllm_ascend.Worker` names what is here. The class is made when
it is first asked for: its base imports torch_npu, which no process may do that will never have a
device.
"""

from typing import Any

from equipoise.integrations.vllm_ascend.config_check import prepare

__all__ = ["prepare"]


def __getattr__(name: str) -> Any:
    """The worker's class. Raises `EngineUnsupported` where its base cannot be imported."""
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.integrations.vllm_ascend.worker import worker_class

    return worker_class()
