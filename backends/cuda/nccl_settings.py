"""Environment variables of NCCL that matter to this backend, and the memory it takes."""

import os

import torch

from equipoise.backends.cuda.cuda_runtime import BLOCKING_SETTINGS
from equipoise.backends.devices.collectives.ccl import FLOAT_SUM_DTYPES, INTEGER_SUM_DTYPES

MIB = 1 << 20
BUFFER = 4 * MIB
"""Bytes of NCCL's buffer between two neighbours on each of its channels: NCCL's default."""
MAX_CTAS = 8
"""Maximum multiprocessors of one communicator's kernels, which run while the model computes: as
many as vLLM gives NCCL. NCCL_MAX_CTAS overrides it. Each has one of NCCL's channels."""
SHARED_DEVICES_VERSION = (2, 30)
"""The first version of NCCL in which two ranks can share a device."""
NCCL_BLOCKING_SETTINGS = (
    *BLOCKING_SETTINGS,
    (
        "NCCL_COMM_BLOCKING",
        lambda text: text == "1",
        "calls of NCCL wait for other ranks, for ever",
    ),
)
"""Environment variables that break the contract (clause P1): name, when, and what they do."""


def blocking_setting() -> str:
    """Which setting makes streams or the host wait, against the contract; empty if none does."""
    for name, wrong, effect in NCCL_BLOCKING_SETTINGS:
        text = os.environ.get(name, "")
        if wrong(text):
            return f"{name}={text} is set: with it {effect}; unset it"
    return ""


def sum_dtypes() -> frozenset[torch.dtype]:
    """Dtypes whose sums are deterministic (D1): integers, and floats if NCCL_ALGO=Ring is set.

    NCCL's tuner may otherwise let the NVLink switches add, where the same inputs need not give the
    same bits again (NCCL #1497). Every reduction has a ring, which adds in the order of the ring.
    """
    ring = os.environ.get("NCCL_ALGO", "").strip().lower() == "ring"
    return INTEGER_SUM_DTYPES | FLOAT_SUM_DTYPES if ring else INTEGER_SUM_DTYPES


def sharing_requested() -> bool:
    """Whether the user asked for two ranks on one device."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def estimate_bytes(link: bool) -> int:
    """An estimate of a communicator's bytes: a buffer per channel and neighbour, of which a ring
    has two and a link one.

    Left out: NCCL's smaller buffers for short messages, its trees, and pairs that it connects at
    their first message. From 2.29.7 on NCCL reports the sum, once a communicator is made.
    """
    ctas = _number("NCCL_MAX_CTAS", MAX_CTAS)
    channels = min(_number("NCCL_MAX_NCHANNELS", ctas), ctas)
    return _number("NCCL_BUFFSIZE", BUFFER) * channels * (1 if link else 2)


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() and int(text) else otherwise
