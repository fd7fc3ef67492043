"""What the environment tells NCCL, as far as it matters here."""

import os

import torch

from equipoise.backends.cuda.cuda_runtime import BLOCKING_SETTINGS
from equipoise.backends.devices.collectives.ccl import FLOAT_SUM_DTYPES, INTEGER_SUM_DTYPES

MIB = 1 << 20
BUFFER = 4 * MIB
"""Bytes between two neighbours on each of NCCL's channels: its own default."""
MAX_CTAS = 8
"""Multiprocessors that the kernels of one communicator may take from the model's step, unless
NCCL_MAX_CTAS says otherwise: as many as vLLM leaves to NCCL. Each has one of NCCL's channels."""
SHARED_DEVICES_VERSION = (2, 30)
"""The first NCCL that lets two ranks work on one device."""
BLOCKING_SETTINGS = (
    *BLOCKING_SETTINGS,
    (
        "NCCL_COMM_BLOCKING",
        lambda text: text == "1",
        "calls of NCCL wait for other ranks, for ever",
    ),
)
"""Settings that break the contract (clause P1): which, when, and what they do."""


def blocking_setting() -> str:
    """Which setting makes streams or the host wait where the contract wants it not to; or none."""
    for name, wrong, what in BLOCKING_SETTINGS:
        text = os.environ.get(name, "")
        if wrong(text):
            return f"{name}={text} is set: with it {what}; unset it"
    return ""


def sum_dtypes() -> frozenset[torch.dtype]:
    """Element types whose sums keep clause D1: integers, and floats where one order is told.

    The tuner may add within NVLink's switches, where the same inputs need not give the same bits
    again (NCCL #1497). The ring is what every kind of sum has, and it adds in the ring's order.
    """
    ring = os.environ.get("NCCL_ALGO", "").strip().lower() == "ring"
    return INTEGER_SUM_DTYPES | FLOAT_SUM_DTYPES if ring else INTEGER_SUM_DTYPES


def sharing_requested() -> bool:
    """Whether two ranks are to work on one device, where NCCL can."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def estimate_bytes(link: bool) -> int:
    """An estimate: a buffer for each channel and neighbour, two of them in a ring, one of a link.

    NCCL has smaller buffers besides for short messages, trees on top, and connects a pair when it
    first sends. How much that is it says from 2.29.7 on, once a communicator is made.
    """
    ctas = _number("NCCL_MAX_CTAS", MAX_CTAS)
    channels = min(_number("NCCL_MAX_NCHANNELS", ctas), ctas)
    return _number("NCCL_BUFFSIZE", BUFFER) * channels * (1 if link else 2)


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() and int(text) else otherwise
