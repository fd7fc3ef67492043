"""All kernels by the reference functions of `hal`: correct, and slow.

A new backend starts with these and overrides what its device does faster, one method at a time.
"""

import torch
from torch import Tensor

from equipoise.hal import routing
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts, route_levelled
from equipoise.hal.routing_rules import ReplicaRule, route_by_rule
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


class ReferenceKernels:
    """Implements `Kernels`: each is one launch around a function of `equipoise.hal`.

    For streams whose launches run host code: a program reads the generation word on the host, so
    on a device that computes behind the host it would wait, and it cannot be captured in a graph.
    """

    levels_on_device = True

    def warm(self, tables: Tables, stream: Stream) -> None:
        """Nothing is compiled."""

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        """Rows per expert; shapes, dtypes and errors as `Kernels.count`."""
        check_count(ids, counts)
        stream.launch(lambda: counts.copy_(routing.count_experts(ids, counts.numel())))

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        """Route by the hash of each row's position; operands as `Kernels.route_and_count`."""
        check_routing(ids, tables, salt.layer, slots, counts)

        def program() -> None:
            table = _live(tables, salt.layer)
            routed = routing.route_hashed(ids, table, salt.rank, salt.layer, salt.step)
            _fill(routed, slots, counts)

        stream.launch(program)

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
        """Route by integer quotas of this batch; operands as `Kernels.route_apportioned`."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_shares(cumulative, tables)

        def program() -> None:
            live_table = _live(tables, salt.layer)
            table = routing.RoutingTable(live_table.start, live_table.replicas, cumulative)
            _fill(routing.route_apportioned(ids, table, salt.rank, salt.layer), slots, counts)

        stream.launch(program)

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
        """Route so that the batch is level; operands as `Kernels.route_levelled`."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_group(group, tables)

        def program() -> None:
            table = _live(tables, salt.layer)
            routed = route_levelled(ids, table, tables.ranks, salt.rank, salt.layer, group)
            _fill(routed, slots, counts)

        stream.launch(program)

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
        """Route as another engine would; operands as `Kernels.route_by_rule`."""
        check_routing(ids, tables, layer, slots, counts)
        check_rule(rule, tables)
        stream.launch(lambda: _fill(route_by_rule(ids, _live(tables, layer), rule), slots, counts))

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        """Water-filling on one layer's counts; operands as `Kernels.solve_shares`."""
        check_solve_shares(counts, tables, layer, cumulative)

        def program() -> None:
            if int(tables.generation[layer]):
                table = _live(tables, layer)
                cumulative.copy_(routing.solve_cumulative(counts, table, tables.ranks))

        stream.launch(program)

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        """Fill the idle set of each changed layer, then advance its generation word."""
        rows = copy_update(update, tables)

        def program() -> None:
            for place, layer in enumerate(rows.layers):
                generation = int(tables.generation[layer]) + 1
                idle = (generation & 1, layer)
                tables.start[idle].copy_(rows.start[place])
                tables.replicas[idle].copy_(rows.replicas[place])
                tables.cumulative[idle].copy_(rows.cumulative[place])
                tables.generation[layer] = generation

        stream.launch(program)

    def checksum(self, data: Tensor, out: Tensor, stream: Stream) -> None:
        """Checksum of a contiguous tensor's bytes."""
        check_checksum(data, out)
        view = data.detach().reshape(-1).view(torch.uint8)
        stream.launch(lambda: out.fill_(as_int64(checksum(view))))


def _live(tables: Tables, layer: int) -> routing.RoutingTable:
    at = (int(tables.generation[layer]) & 1, layer)
    return routing.RoutingTable(tables.start[at], tables.replicas[at], tables.cumulative[at])


def _fill(routed: tuple[Tensor, Tensor], slots: Tensor, counts: Tensor) -> None:
    slots.copy_(routed[0])
    counts.copy_(routed[1])
