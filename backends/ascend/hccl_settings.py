"""Environment variables of HCCL that matter to this backend, and the device memory it takes.

HCCL allocates two buffers per communicator, one to send from and one to receive into, for as long
as the communicator lives. It does not report them.
"""

import os

import torch

from equipoise.backends.devices.collectives.ccl import FLOAT_SUM_DTYPES, INTEGER_SUM_DTYPES

MIB = 1 << 20
GROUP_BUFFER = 200
"""MiB of each of a communicator's two buffers: HCCL's default."""
LINK_BUFFER = 20
"""MiB of each of the two buffers of a link between two ranks: torch_npu's default."""
SMALLEST = 1
"""MiB: the smallest buffer that HCCL accepts."""


def group_buffer_mib() -> int:
    """MiB of a communicator's buffer, by HCCL_BUFFSIZE."""
    return max(_number("HCCL_BUFFSIZE", GROUP_BUFFER), SMALLEST)


def link_buffer_mib() -> int:
    """MiB of a link's buffer, by P2P_HCCL_BUFFSIZE; 0 means the smallest possible.

    To torch_npu, 0 means that messages use the group's communicator. Here they never do, because
    all operations of a communicator share one stream and wait for each other there (clause P1).
    """
    return max(_number("P2P_HCCL_BUFFSIZE", LINK_BUFFER), SMALLEST)


def deterministic() -> bool:
    """Whether HCCL is set to add in a fixed order: otherwise sums of floats may differ between
    runs."""
    return os.environ.get("HCCL_DETERMINISTIC", "").lower() in ("true", "strict")


def blocking_setting() -> str:
    """Which setting makes torch_npu block the host, against the contract; empty if none does.

    They are meant for debugging: a send would wait for its receive on the host (clause P1).
    """
    for name in ("TORCH_HCCL_BLOCKING_WAIT", "HCCL_BLOCKING_WAIT", "ASCEND_LAUNCH_BLOCKING"):
        if os.environ.get(name, "0") not in ("", "0"):
            return f"{name} is set: with it operations block the host; unset it"
    return ""


def sum_dtypes() -> frozenset[torch.dtype]:
    """Dtypes whose sums are deterministic (D1): integers, and floats if HCCL is set so."""
    return INTEGER_SUM_DTYPES | FLOAT_SUM_DTYPES if deterministic() else INTEGER_SUM_DTYPES


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else otherwise


BUFFERS = 2
"""Buffers per communicator, of the same size."""


def comm_bytes(mib: int) -> int:
    """Bytes of a communicator whose buffers have `mib` MiB each."""
    return BUFFERS * mib * MIB
