"""Registers a process group in Python with torch.distributed: `c10d:python_groups:python`.

To be copied. torch calls these methods because the class is a `ProcessGroup`; of a subclass of a
built-in group, such as `ProcessGroupGloo`, it calls none. What has no method is declared absent.
"""

from datetime import timedelta
from typing import Any

from torch.distributed import Backend, ProcessGroup, ProcessGroupGloo


class PythonGroup(ProcessGroup):
    """Has sums and messages, which are gloo's."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:
        """The name that is registered below."""
        return "python"

    @property
    def group_name(self) -> str:
        """What `destroy_process_group` asks for."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: Any, options: Any) -> Any:
        """Sum in place; returns a `torch.distributed.Work`."""
        return self._gloo.allreduce(tensors, options)

    def send(self, tensors: Any, destination: int, tag: int) -> Any:
        """Send; returns a work."""
        return self._gloo.send(tensors, destination, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        """Receive into the tensors; returns a work."""
        return self._gloo.recv(tensors, source, tag)


Backend.register_backend("python", PythonGroup, devices=["cpu"])
