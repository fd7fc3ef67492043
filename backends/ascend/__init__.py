"""The Ascend backend: torch_npu streams, device memory, HCCL. Importing it imports no vendor."""

from equipoise.backends.ascend.backend import AscendBackend
from equipoise.backends.ascend.fabric import HcclBackend

BACKEND = AscendBackend()
HCCL = HcclBackend()

__all__ = ["BACKEND", "HCCL"]
