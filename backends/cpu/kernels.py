"""The small kernels, native and on the calling stream's worker."""

import torch
from torch import Tensor

from equipoise import _native
from equipoise.hal.checksum import as_int64
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing import SWEEPS
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash
from equipoise.hal.stream import Stream
from equipoise.hal.support.reference_kernels import ReferenceKernels
from equipoise.hal.support.validation import (
    check_checksum,
    check_count,
    check_group,
    check_routing,
    check_rule,
    check_shares,
    check_solve_shares,
)


class CpuKernels(ReferenceKernels):
    """All but the commit of tables over `equipoise._native`: that one only copies."""

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        """Tokens per expert."""
        check_count(ids, counts)
        stream.launch(lambda: _native.count_experts(ids.numpy(), counts.numpy()))

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        """Route by the hash of each token's place."""
        check_routing(ids, tables, salt.layer, slots, counts)

        def program() -> None:
            live = _live(tables, salt.layer)
            _native.route_hashed(
                ids.numpy(),
                tables.start[live].numpy(),
                tables.replicas[live].numpy(),
                tables.cumulative[live].numpy(),
                salt.rank,
                salt.layer,
                salt.step,
                slots.numpy(),
                counts.numpy(),
            )

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
        """Route by integer quotas of this batch."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_shares(cumulative, tables)

        def program() -> None:
            live = _live(tables, salt.layer)
            _native.route_apportioned(
                ids.numpy(),
                tables.start[live].numpy(),
                tables.replicas[live].numpy(),
                cumulative.numpy(),
                salt.rank,
                salt.layer,
                slots.numpy(),
                counts.numpy(),
            )

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
        """Route so that the batch is level over the ranks."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_group(group, tables)

        def program() -> None:
            live = _live(tables, salt.layer)
            summed = () if group is None else (group.total.numpy(), group.before.numpy())
            _native.route_levelled(
                ids.numpy(),
                tables.start[live].numpy(),
                tables.replicas[live].numpy(),
                tables.ranks,
                salt.rank,
                salt.layer,
                slots.numpy(),
                counts.numpy(),
                *summed,
            )

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
        """Route as another engine would."""
        check_routing(ids, tables, layer, slots, counts)
        check_rule(rule, tables)

        def program() -> None:
            live = _live(tables, layer)
            batch = ids.numpy(), tables.start[live].numpy(), tables.replicas[live].numpy()
            out = slots.numpy(), counts.numpy()
            match rule:
                case RowHash(top_k, rows):
                    _native.route_by_row_hash(*batch, top_k, int(rows), *out)
                case BlockTurns(offset):
                    _native.route_by_block_turns(*batch, offset, *out)

        stream.launch(program)

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        """Water-filling on one layer's counts."""
        check_solve_shares(counts, tables, layer, cumulative)

        def program() -> None:
            live = _live(tables, layer)
            if not int(tables.generation[layer]):
                return  # it has no order yet in which shares could be written
            _native.solve_cumulative(
                counts.numpy(),
                tables.start[live].numpy(),
                tables.replicas[live].numpy(),
                tables.ranks,
                SWEEPS,
                cumulative.numpy(),
            )

        stream.launch(program)

    def checksum(self, data: Tensor, out: Tensor, stream: Stream) -> None:
        """Checksum of a contiguous tensor's bytes."""
        check_checksum(data, out)
        view = data.detach().reshape(-1).view(torch.uint8)

        def program() -> None:
            out[0] = as_int64(_native.checksum(view.numpy()))

        stream.launch(program)


def _live(tables: Tables, layer: int) -> tuple[int, int]:
    return int(tables.generation[layer]) & 1, layer
