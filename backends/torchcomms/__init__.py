"""Any backend of torchcomms as a communicator, as it is: `torchcomms:NAME`."""

from equipoise.backends.torchcomms.backend import torchcomms_backend

__all__ = ["torchcomms_backend"]
