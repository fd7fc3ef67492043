"""vLLM's second model runner, the one that GPUs get, on the host.

The hole: it wants a Triton with a backend for CPUs, which is distributed apart. Triton's own
interpreter runs the same kernels, if vLLM takes this Triton for one that has that backend.
"""

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

ENVIRONMENT: Mapping[str, str] = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Of processes in which this hole is filled; Triton reads it when it is first imported."""


def stand_in_for_backend() -> None:
    """Let Triton pass for one with a backend for CPUs; before vLLM looks for it."""
    backends: dict[str, Any] = import_module("triton.backends").backends
    never = SimpleNamespace(is_active=lambda: False)
    backends["cpu"] = SimpleNamespace(driver=never, compiler=None)
