"""An accelerator and a network in one thread, whose every interleaving is chosen."""

from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.backends.virtual.fabric import VirtualCommunicatorBackend

BACKEND = VirtualBackend()
COMMUNICATOR = VirtualCommunicatorBackend(BACKEND)

__all__ = ["BACKEND", "COMMUNICATOR"]
