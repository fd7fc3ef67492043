"""The CPU backend: worker-thread streams, host memory, gloo."""

from equipoise.backends.cpu.accelerator import CpuBackend
from equipoise.backends.cpu.gloo import GlooBackend

BACKEND = CpuBackend()
GLOO = GlooBackend()

__all__ = ["BACKEND", "GLOO"]
