"""The small kernels, launched on the streams of the contract."""

from importlib import import_module
from typing import Any


def make_kernels() -> Any:
    """Triton's, imported with the first device that is opened."""
    return import_module("equipoise.backends.cuda.kernels.launchers")
