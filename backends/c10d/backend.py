"""`c10d:NAME`: any backend of `torch.distributed`."""

from functools import partial
from importlib import import_module

from torch import distributed

from equipoise.backends.c10d.communicator import C10dCommunicator
from equipoise.backends.common.library import LibraryBackend
from equipoise.hal.errors import BackendUnavailable


def c10d_backend(name: str) -> LibraryBackend:
    """The backend `NAME` of `torch.distributed`, or `MODULE:NAME`, where importing registers it.

    Raises:
        BackendUnavailable: torch has no such backend, or the module does not import.
    """
    module, _, backend = name.rpartition(":")
    if not distributed.is_available():
        raise BackendUnavailable("this build of torch has no torch.distributed")
    if module:
        try:
            import_module(module)
        except Exception as error:
            raise BackendUnavailable(f"c10d:{name}: {module} does not import: {error}") from error
    known = distributed.Backend.backend_list
    backend = backend.lower()
    if backend not in known:
        names = ", ".join(sorted(set(known) - {"undefined"}))
        raise BackendUnavailable(
            f"torch.distributed has no backend {backend!r}; it has: {names} "
            f"(name the module that registers it: c10d:MODULE:{backend}; "
            "HCCL is c10d:torch_npu:hccl)"
        )
    return LibraryBackend(
        f"c10d:{backend}", device_type(backend), partial(C10dCommunicator, backend)
    )


def device_type(backend: str) -> str:
    """The type of device that a backend is tried on: the host, if it has tensors there."""
    types = distributed.Backend.backend_capability.get(backend, ["cpu"])
    return "cpu" if "cpu" in types else types[0]
