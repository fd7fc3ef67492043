"""Stand-ins for what vllm-ascend imports, and a machine without its hardware does not have.

Modules below these names can be imported, and have every attribute: enough for classes and
functions to be defined, and for nothing to be computed. `torch.npu` remembers its calls.
"""

import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

import torch

NAMES = "acl", "torch_npu", "torchair", "torchvision"
"""torchvision is there, but its usual build needs another torch."""
RELOADED = "torchair.fx_summary"
"""vllm-ascend loads it again, and so expects it to be loaded."""


class StandIn(ModuleType):
    """A module and a package at once."""

    __version__ = "0.28.0"
    """torchvision is asked for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self)["__path__"] = []

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        mock = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, mock)
        return mock


class Finder(MetaPathFinder, Loader):
    """Finds a stand-in for every name at or below some.

    Args:
        names: of packages.
    """

    def __init__(self, names: Collection[str] = NAMES) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] in self._names
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def install() -> MagicMock:
    """Have the stand-ins found; once. Returns what stands for `torch.npu`."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
        device = MagicMock(name="torch.npu")
        device.current_device.return_value = 0
        torch.npu = device  # type: ignore[attr-defined]
        import_module(RELOADED)
    device_module: MagicMock = torch.npu  # type: ignore[attr-defined]
    return device_module
