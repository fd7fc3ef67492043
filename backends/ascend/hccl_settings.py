"""What the environment tells HCCL, as far as it matters here.

The device memory that communicators of HCCL's take, for whoever plans or reports it.

HCCL takes two buffers a communicator, one to send from and one to receive into, for as long as the
communicator lives. It reports them nowhere.
"""

import os

import torch

from equipoise.backends.devices.collectives.ccl import FLOAT_SUM_DTYPES, INTEGER_SUM_DTYPES

MIB = 1 << 20
GROUP_BUFFER = 200
"""MiB of each of the two buffers of a communicator: HCCL's own default."""
LINK_BUFFER = 20
"""MiB of each of the two buffers of a link between two ranks: torch_npu's own default."""
SMALLEST = 1
"""MiB: the least that HCCL takes."""


def group_buffer_mib() -> int:
    """MiB of a communicator's buffer, as HCCL_BUFFSIZE says."""
    return max(_number("HCCL_BUFFSIZE", GROUP_BUFFER), SMALLEST)


def link_buffer_mib() -> int:
    """MiB of a link's buffer, as P2P_HCCL_BUFFSIZE says; its 0 asks for as little as can be.

    Torch_npu itself reads 0 as: messages use the group's communicator. Ours never do, since all of
    a communicator's operations share one stream and wait for each other there (clause P1).
    """
    return max(_number("P2P_HCCL_BUFFSIZE", LINK_BUFFER), SMALLEST)


def deterministic() -> bool:
    """Whether HCCL was told to add in one order: without it floating sums may not repeat."""
    return os.environ.get("HCCL_DETERMINISTIC", "").lower() in ("true", "strict")


def blocking_setting() -> str:
    """Which setting makes torch_npu block the host where the contract wants it not to; or nothing.

    A debugger's settings: with them a send would wait for its receive on the host (clause P1).
    """
    for name in ("TORCH_HCCL_BLOCKING_WAIT", "HCCL_BLOCKING_WAIT", "ASCEND_LAUNCH_BLOCKING"):
        if os.environ.get(name, "0") not in ("", "0"):
            return f"{name} is set: with it operations block the host; unset it"
    return ""


def sum_dtypes() -> frozenset[torch.dtype]:
    """Element types whose sums keep clause D1: integers, and floats if they repeat."""
    return INTEGER_SUM_DTYPES | FLOAT_SUM_DTYPES if deterministic() else INTEGER_SUM_DTYPES


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else otherwise


BUFFERS = 2
"""Of the same size in every communicator."""


def comm_bytes(mib: int) -> int:
    """Bytes that a communicator takes whose buffers have so many MiB."""
    return BUFFERS * mib * MIB
