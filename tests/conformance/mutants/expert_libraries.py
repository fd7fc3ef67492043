"""Expert-parallel libraries made of our exchange, with groups of another class."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.expert_parallel import ExpertParallelCapabilities, ExpertParallelConfig
from equipoise.hal.stream import Stream
from equipoise.hal.work import Work
from equipoise.pipeline.all_to_all.expert_parallel import (
    FIXED_CAPACITY,
    FixedCapacityGroup,
    FixedCapacityLibrary,
    VariableSizeGroup,
    VariableSizeLibrary,
    exchange_format,
)
from equipoise.pipeline.all_to_all.fixed_capacity import FixedCapacityExchange
from equipoise.pipeline.all_to_all.formats import ExchangeFormat, ReceivedRows
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels, device_allocator
from equipoise.pipeline.all_to_all.transport import AllToAllTransport


@dataclass(frozen=True)
class FixedLibrary(FixedCapacityLibrary):
    """The exchange with fixed capacities, with that class of groups."""

    group: type[FixedCapacityGroup] = FixedCapacityGroup

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> FixedCapacityGroup:
        form = exchange_format(config, fabric.control.size)
        return self.group(form, accelerator, fabric.open(purpose), config.deadline)


@dataclass(frozen=True)
class VariableLibrary(VariableSizeLibrary):
    """The exchange with variable sizes, with that class of groups."""

    group: type[VariableSizeGroup] = VariableSizeGroup

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> VariableSizeGroup:
        form = exchange_format(config, fabric.control.size)
        return self.group(form, accelerator, fabric, purpose, config.deadline)


class CompletedWork:
    """What was launched on a stream: it needs no waiting there."""

    def done(self) -> bool:
        return True

    def wait(self, stream: Stream) -> None:
        """All is on one stream."""

    def result(self, timeout: float) -> None:
        """It ended."""

    def cancel(self) -> None:
        """It ended."""


class OwnMessages:
    """The transport of a rank that is alone: a copy on the stream, which a graph captures."""

    rank = 0
    active = (True,)

    def all_to_all(self, into: Tensor, source: Tensor, stream: Stream) -> Work:
        stream.launch(partial(into.copy_, source))
        return CompletedWork()


class LoneGroup(FixedCapacityGroup):
    """A group of one rank, all of which may be captured."""

    def _make_exchange(
        self, form: ExchangeFormat, accelerator: Accelerator, transport: AllToAllTransport
    ) -> FixedCapacityExchange:
        kernels = TorchKernels(form, OwnMessages(), device_allocator(accelerator.device))
        return FixedCapacityExchange(form, kernels, accelerator)


@dataclass(frozen=True)
class LoneLibrary(FixedLibrary):
    """A library for one rank that declares graphs."""

    name: str = "lone"
    group: type[FixedCapacityGroup] = LoneGroup

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        changes: dict[str, Any] = {"group_sizes": (1,), "graph_capture": True}
        return replace(FIXED_CAPACITY.capabilities, **changes)


class RoundingGroup(FixedCapacityGroup):
    """Rows reach their experts half a percent too large."""

    def _list_rows(
        self, received: ReceivedRows, rows: Tensor, experts: Tensor, counts: Tensor
    ) -> None:
        super()._list_rows(received, rows, experts, counts)
        rows.mul_(1.005)


@dataclass(frozen=True)
class RoundingLibrary(FixedLibrary):
    """A library whose rows are not exact, and which may say so.

    Attributes:
        relative_error: what it declares.
    """

    group: type[FixedCapacityGroup] = RoundingGroup
    relative_error: float = 0.01

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        changes: dict[str, Any] = {"dtypes": (torch.float32,)}
        changes["relative_error"] = self.relative_error
        return replace(FIXED_CAPACITY.capabilities, **changes)


LONE = LoneLibrary()
