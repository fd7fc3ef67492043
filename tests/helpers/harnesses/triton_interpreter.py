"""Triton kernels without a device: its interpreter runs them on the host, one program at a time."""

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def interpret_without_device() -> None:
    """Before any kernel is defined: a kernel is interpreted for good, or compiled for good."""
    if DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    # Unset it warns, and warnings are errors; no kernel has a floating-point number.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
