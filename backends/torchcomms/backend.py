"""`torchcomms:NAME`: any backend of torchcomms."""

from functools import partial
from importlib import import_module

from equipoise.backends.common.library import LibraryBackend
from equipoise.backends.torchcomms.communicator import TorchCommsCommunicator
from equipoise.hal.errors import BackendUnavailable

DEVICE_TYPES = {"gloo": "cpu", "dummy": "cpu", "xccl": "xpu", "hccl": "npu"}
"""What each backend works on; all others on CUDA devices."""


def torchcomms_backend(name: str) -> LibraryBackend:
    """The backend `NAME` of torchcomms. Raises `BackendUnavailable` where torchcomms is not."""
    try:
        library = import_module("torchcomms")
        library.new_comm  # noqa: B018 - a placeholder of that name has none
    except Exception as error:
        raise BackendUnavailable(
            f"torchcomms:{name}: torchcomms does not import: {error}"
        ) from error
    device = DEVICE_TYPES.get(name, "cuda")
    make = partial(TorchCommsCommunicator, library, name, device)
    return LibraryBackend(f"torchcomms:{name}", device, make)
