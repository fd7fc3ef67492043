"""The launchers of a package of Triton kernels: of the real one, or of a copy that is broken.

Checks take them as an argument, so that the same checks can be held to both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.harnesses.triton_interpreter import DEVICE
from torch import Tensor

REAL = "equipoise.backends.cuda.kernels"
Launcher = Callable[..., None]


@dataclass(frozen=True)
class Launchers:
    """Of one package."""

    package: str

    def __post_init__(self) -> None:
        # Now: a module that is imported while another is patched would keep what it saw there.
        self.module("warmup")

    def module(self, name: str) -> ModuleType:
        return import_module(f"{self.package}.{name}")

    @property
    def count(self) -> Launcher:
        return self._launcher("counting", "count")

    @property
    def route_hashed(self) -> Launcher:
        return self._launcher("hash_routing", "route_hashed")

    @property
    def route_apportioned(self) -> Launcher:
        return self._launcher("quota_routing", "route_apportioned")

    @property
    def route_levelled(self) -> Launcher:
        return self._launcher("levelled_routing", "route_levelled")

    @property
    def route_by_rule(self) -> Launcher:
        return self._launcher("engine_rules", "route_by_rule")

    @property
    def solve_shares(self) -> Launcher:
        return self._launcher("share_solver", "solve_shares")

    @property
    def commit_tables(self) -> Launcher:
        return self._launcher("table_commit", "commit_tables")

    @property
    def checksum(self) -> Launcher:
        return self._launcher("checksums", "checksum")

    @property
    def checksum_rows(self) -> Launcher:
        return self._launcher("checksums", "checksum_rows")

    @property
    def checksum_parts(self) -> Launcher:
        return self._launcher("checksums", "checksum_parts")

    def workspace(
        self, experts: int = 1, slots: int = 1, ranks: int = 1, elements: int = 0, buffers: int = 1
    ) -> Any:
        """A fresh one on the device."""
        module = self.module("workspace")
        return module.Workspace.make(module.Sizes(experts, slots, ranks, elements, buffers), DEVICE)

    @contextmanager
    def small_blocks(self, few: int, many: int) -> Iterator[None]:
        """Batches of more than `few` elements are divided among programs of `many`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.module("histogram"), "BATCHES", ((few, few, 8),))
            patch.setattr(self.module("histogram"), "LARGE_BATCH", (many, 8))
            yield

    @contextmanager
    def small_numbering(self, block: int, small: int, rows: int) -> Iterator[None]:
        """Occurrences are numbered in blocks of `block`; more than `small` elements are counted
        before, `rows` blocks at a time."""
        with pytest.MonkeyPatch.context() as patch:
            for module in ("workspace", "quota_routing", "levelled_routing", "engine_rules"):
                patch.setattr(self.module(module), "BLOCK", block)
            for module in ("quota_routing", "levelled_routing"):
                patch.setattr(self.module(module), "SMALL", small)
                patch.setattr(self.module(module), "ROWS", rows)
            yield

    def _launcher(self, module: str, name: str) -> Launcher:
        launcher: Launcher = getattr(self.module(module), name)
        return launcher


def is_clean(workspace: Any) -> bool:
    """Whether everything is zero that has to be between two launches."""
    sizes = workspace.sizes
    levels = workspace.water[-4 * sizes.lanes :]
    links = workspace.water[2 * sizes.spare * sizes.lanes :][: sizes.spare * sizes.lanes]
    parts = (workspace.totals, workspace.sums, workspace.tickets, levels, links)
    return not any(bool(part.any()) for part in parts)


def on_device(values: Tensor) -> Tensor:
    return values.to(DEVICE)


def guarded(elements: int, offset: int, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    """Memory filled with -7, and a part of it for a result."""
    whole = torch.full((elements + 8,), -7, dtype=dtype, device=DEVICE)
    return whole, whole[offset : offset + elements]


def intact(whole: Tensor, elements: int, offset: int) -> bool:
    """Whether nothing was written outside the part."""
    outside = torch.cat([whole[:offset], whole[offset + elements :]])
    return bool((outside == -7).all())
