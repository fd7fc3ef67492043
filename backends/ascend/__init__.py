"""The Ascend backend: torch_npu streams, device memory, HCCL. Importing it imports no vendor."""

from equipoise.backends.ascend.backend import AscendBackend

BACKEND = AscendBackend()

__all__ = ["BACKEND"]
