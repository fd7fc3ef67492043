"""The CUDA backend: torch.cuda streams, stream memory operations, Triton kernels.

Importing it imports no vendor and initialises no device.
"""

from equipoise.backends.cuda.backend import CudaBackend

BACKEND = CudaBackend()

__all__ = ["BACKEND"]
