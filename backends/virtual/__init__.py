"""An accelerator and a network in one thread, whose every interleaving is chosen."""

from equipoise.backends.virtual.backend import VirtualBackend

BACKEND = VirtualBackend()

__all__ = ["BACKEND"]
