"""The Ascend backend: torch_npu streams, device memory, HCCL. Importing it imports no vendor."""

from equipoise.backends.ascend.accelerator import AscendBackend
from equipoise.backends.ascend.hccl import HCCL

BACKEND = AscendBackend()

__all__ = ["BACKEND", "HCCL"]
