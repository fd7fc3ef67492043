"""The device memory that communicators of HCCL's take, for whoever plans or reports it.

HCCL takes two buffers a communicator, one to send from and one to receive into, for as long as the
communicator lives. It reports them nowhere.
"""

from equipoise.backends.ascend.settings import MIB

BUFFERS = 2
"""Of the same size in every communicator."""


def taken(mib: int) -> int:
    """Bytes that a communicator takes whose buffers have so many MiB."""
    return BUFFERS * mib * MIB
