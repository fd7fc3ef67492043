"""The CPU backend: worker-thread streams, host memory, gloo.

Its objects are made when they are asked for: gloo needs no native code, the accelerator does.
"""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.backends.cpu.accelerator import CpuBackend
    from equipoise.backends.cpu.gloo import GlooBackend

    BACKEND: CpuBackend
    GLOO: GlooBackend

__all__ = ["BACKEND", "GLOO"]


@cache
def _backend() -> "CpuBackend":
    from equipoise.backends.cpu.accelerator import CpuBackend

    return CpuBackend()


@cache
def _gloo() -> "GlooBackend":
    from equipoise.backends.cpu.gloo import GlooBackend

    return GlooBackend()


def __getattr__(name: str) -> object:
    """The object of an entry point."""
    if name == "BACKEND":
        return _backend()
    if name == "GLOO":
        return _gloo()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
