"""The kernels that run on every step, and the persistent tables that they read.

Semantics and torch references: `equipoise.hal.routing`, `equipoise.hal.levelled_routing` and
`equipoise.hal.routing_rules`. No kernel synchronises the host.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing_rules import ReplicaRule
from equipoise.hal.stream import Stream


@dataclass(frozen=True)
class Tables:
    """Routing tables of all layers: two sets, and one generation word per layer that picks the set.

    A reader loads the word once and reads the set `word & 1`; a commit fills the other set and
    then writes the word, so no reader ever sees half of a table (clause V3).

    Attributes:
        generation: int64 [layers], counts commits of the layer.
        start: int32 [2, layers, experts + 1], exclusive prefix sums of replica counts.
        replicas: int32 [2, layers, slots], slots by expert, ascending; each once.
        cumulative: int32 [2, layers, slots], inclusive cumulative shares within the expert, in
            units of 1 / 65536.
    """

    generation: Tensor
    start: Tensor
    replicas: Tensor
    cumulative: Tensor
    ranks: int
    """Number of ranks that the slots are divided among, contiguously."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.generation.shape[0]

    @property
    def experts(self) -> int:
        """Number of logical experts per layer."""
        return self.start.shape[2] - 1

    @property
    def slots(self) -> int:
        """Number of slots per layer, over all ranks."""
        return self.replicas.shape[2]

    @staticmethod
    def empty(layers: int, experts: int, slots: int, ranks: int, device: torch.device) -> "Tables":
        """Create zeroed tables; nothing may be routed before the first commit.

        They are zeroed on the host: a device would zero them on the current stream, and a commit
        on another stream could run first.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype).to(device)

        return Tables(
            generation=zeros(layers, dtype=torch.int64),
            start=zeros(2, layers, experts + 1),
            replicas=zeros(2, layers, slots),
            cumulative=zeros(2, layers, slots),
            ranks=ranks,
        )


@dataclass(frozen=True)
class TableUpdate:
    """New tables of some layers, on the host: what `commit_tables` installs.

    Attributes:
        layers: which layers change.
        start: int32 [len(layers), experts + 1].
        replicas: int32 [len(layers), slots].
        cumulative: int32 [len(layers), slots].
    """

    layers: tuple[int, ...]
    start: Tensor
    replicas: Tensor
    cumulative: Tensor


@dataclass(frozen=True)
class Salt:
    """Inputs that make the hash of a routing pass differ between ranks, layers and steps."""

    rank: int
    layer: int
    step: int


@runtime_checkable
class Kernels(Protocol):
    """Kernels of one device: safe in captured graphs, stream-ordered, on persistent tensors.

    `ids` are expert ids, int32 [n]; an id outside [0, experts) is padding: it is routed to the
    invalid slot (= slots) and not counted. `slots` int32 [n] and `counts` int32 [experts] are
    overwritten. All operands are contiguous, on the device of the tables; any other, and a layer
    that has no tables, raises `KernelError` at the call (clause G11);
    `hal.support.validation` has the checks.
    """

    @property
    def levels_on_device(self) -> bool:
        """Whether `route_levelled` runs on the device; false if each pass calls the host."""
        ...

    def warm(self, tables: Tables, stream: Stream) -> None:
        """Prepare every kernel that will be launched on tables of that size.

        Compiling kernels at their first launch takes seconds, which must not fall into a step.
        No visible state changes; all launches are on `stream`.
        """
        ...

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        """Count the rows of each expert."""
        ...

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        """Map expert ids to slots by a hash of each row's position; shares are the table's."""
        ...

    def route_apportioned(
        self,
        ids: Tensor,
        tables: Tables,
        cumulative: Tensor,
        salt: Salt,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        """Map expert ids to slots by integer quotas of this batch; shares are `cumulative`."""
        ...

    def route_levelled(
        self,
        ids: Tensor,
        tables: Tables,
        salt: Salt,
        group: GroupCounts | None,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        """Map expert ids to slots so that every rank gets as many rows of the batch.

        Shares are not read, nor is the salt's step. With `group` the batch is part of one that
        several ranks divide together; the salt's rank is then the same on all of them.
        """
        ...

    def route_by_rule(
        self,
        rule: ReplicaRule,
        ids: Tensor,
        tables: Tables,
        layer: int,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> None:
        """Map expert ids to slots by another engine's rule, which ignores shares."""
        ...

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        """Compute the shares that minimise the largest rank load for `counts`, int64 [experts].

        `counts` are at most 2**37 together: the load of a window, not only of a batch.
        Writes `cumulative`, int32 [slots], in the order of the layer's table. A layer that has no
        tables yet (generation 0) has no such order: `cumulative` is left as it is (clause G12).
        """
        ...

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        """Fill the idle set of the changed layers, then advance their generation words.

        The update is read at the call: the caller may change it afterwards. Raises `KernelError`
        where a layer is named twice.
        """
        ...

    def checksum(self, data: Tensor, out: Tensor, stream: Stream) -> None:
        """Write `equipoise.hal.checksum` of `data`'s bytes to `out`, int64 [1].

        Both may have any alignment; `data` is C-contiguous.
        """
        ...
