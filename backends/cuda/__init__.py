"""The CUDA backend: torch.cuda streams, stream memory operations, Triton kernels, NCCL.

Importing it imports no vendor and initialises no device.
"""

from equipoise.backends.cuda.accelerator import CudaBackend
from equipoise.backends.cuda.nccl import NCCL

BACKEND = CudaBackend()

__all__ = ["BACKEND", "NCCL"]
