"""The small kernels in micro-steps; their values are those of the native core (clause G4)."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise import _native
from equipoise.backends.virtual.arena import bytes_of
from equipoise.backends.virtual.scheduling import in_turn
from equipoise.backends.virtual.stream import own_stream
from equipoise.hal.checksum import as_int64
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing import SWEEPS
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash
from equipoise.hal.stream import Stream
from equipoise.hal.support.validation import (
    check_checksum,
    check_count,
    check_group,
    check_routing,
    check_rule,
    check_shares,
    check_solve_shares,
    copy_update,
)

if TYPE_CHECKING:
    from equipoise.backends.virtual.device import VirtualDevice


Set = tuple[int, int]
"""Which of the two sets, and the layer."""


class VirtualKernels:
    """A routing kernel takes the generation word in one micro-step and reads the tables in a
    later one; a commit fills the idle set array by array and writes the word last (G1, G2).
    """

    levels_on_device = True

    def __init__(self, device: "VirtualDevice") -> None:
        self._device = device

    def warm(self, tables: Tables, stream: Stream) -> None:
        """Everything is ready."""

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        """Tokens per expert."""
        check_count(ids, counts)
        own_stream(stream).launch(lambda: _native.count_experts(ids, counts))

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        """Route by the hash of each token's place."""
        check_routing(ids, tables, salt.layer, slots, counts)

        def steps() -> Iterator[None]:
            live = self.live(tables, salt.layer)
            yield
            start, replicas, cumulative = self.arrays(tables, live)
            place = (salt.rank, salt.layer, salt.step)
            _native.route_hashed(ids, start, replicas, cumulative, *place, slots, counts)

        own_stream(stream).perform(steps)

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
        """Route by integer quotas of this batch."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_shares(cumulative, tables)

        def steps() -> Iterator[None]:
            live = self.live(tables, salt.layer)
            yield
            start, replicas, _ = self.arrays(tables, live)
            place = (salt.rank, salt.layer)
            _native.route_apportioned(ids, start, replicas, cumulative, *place, slots, counts)

        own_stream(stream).perform(steps)

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
        """Route so that the batch is level over the ranks."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_group(group, tables)

        def steps() -> Iterator[None]:
            live = self.live(tables, salt.layer)
            yield
            start, replicas, _ = self.arrays(tables, live)
            place = (tables.ranks, salt.rank, salt.layer)
            summed = () if group is None else (group.total, group.before)
            _native.route_levelled(ids, start, replicas, *place, slots, counts, *summed)

        own_stream(stream).perform(steps)

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
        """Route as another engine would."""
        check_routing(ids, tables, layer, slots, counts)
        check_rule(rule, tables)

        def steps() -> Iterator[None]:
            live = self.live(tables, layer)
            yield
            start, replicas, _ = self.arrays(tables, live)
            match rule:
                case RowHash(top_k, rows):
                    _native.route_by_row_hash(ids, start, replicas, top_k, int(rows), slots, counts)
                case BlockTurns(offset):
                    _native.route_by_block_turns(ids, start, replicas, offset, slots, counts)

        own_stream(stream).perform(steps)

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        """Water-filling on one layer's counts."""
        check_solve_shares(counts, tables, layer, cumulative)

        def steps() -> Iterator[None]:
            live = self.live(tables, layer)
            yield
            start, replicas, _ = self.arrays(tables, live)
            if not int(tables.generation[layer]):
                return  # it has no order yet in which shares could be written
            _native.solve_cumulative(counts, start, replicas, tables.ranks, SWEEPS, cumulative)

        own_stream(stream).perform(steps)

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        """Fill the idle set of each changed layer, then advance its generation word."""
        rows = copy_update(update, tables)

        def steps() -> Iterator[None]:
            return in_turn(
                part
                for place in range(len(rows.layers))
                for part in self.parts_of_commit(rows, tables, place)
            )

        own_stream(stream).perform(steps)

    def checksum(self, data: Tensor, out: Tensor, stream: Stream) -> None:
        """Checksum of a contiguous tensor's bytes."""
        check_checksum(data, out)
        view = bytes_of(data)

        def program() -> None:
            out[0] = as_int64(_native.checksum(view))

        own_stream(stream).launch(program)

    def live(self, tables: Tables, layer: int) -> Set:
        """The set that the generation word picks now."""
        return int(tables.generation[layer]) & 1, layer

    def idle(self, tables: Tables, layer: int) -> Set:
        """The other one."""
        return 1 - self.live(tables, layer)[0], layer

    def arrays(self, tables: Tables, of: Set) -> tuple[Tensor, Tensor, Tensor]:
        """Start, replicas and cumulative shares of a set."""
        return tables.start[of], tables.replicas[of], tables.cumulative[of]

    def parts_of_commit(
        self, update: TableUpdate, tables: Tables, place: int
    ) -> tuple[Callable[[], object], ...]:
        """What a commit of one layer does, in this order; others may come between."""
        layer = update.layers[place]
        start, replicas, cumulative = self.arrays(tables, self.idle(tables, layer))
        return (
            lambda: start.copy_(update.start[place]),
            lambda: replicas.copy_(update.replicas[place]),
            lambda: cumulative.copy_(update.cumulative[place]),
            lambda: tables.generation[layer].add_(torch.ones((), dtype=torch.int64)),
        )
