"""Any process group of `torch.distributed` as a communicator, as it is: `c10d:NAME`."""

from equipoise.backends.c10d.backend import c10d_backend

__all__ = ["c10d_backend"]
