"""The small kernels as operators of the device; share solver and levelled routing on the host.

Made of torch's operators. A Triton-Ascend kernel may replace any function of `routing`, since its
values are defined bit for bit (clause G4).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.backends.ascend import routing_ops
from equipoise.backends.ascend.hashing import device_checksum
from equipoise.backends.ascend.host_functions import HostJobs, RouteLevelled, SolveShares
from equipoise.backends.ascend.lookup_tables import (
    BatchIndices,
    ReplicaTables,
    replica_tables_of,
    slots_by_position,
)
from equipoise.backends.devices.memory import copy, pack_table_update, record_stream_use
from equipoise.backends.devices.stream import own_stream
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing import window_begin
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
    check_update,
)


class AscendKernels:
    """Launches on the stream that they are given, on tensors of its device."""

    levels_on_device = False

    def __init__(self) -> None:
        self._jobs = HostJobs()
        self._indices = BatchIndices()

    def warm(self, tables: Tables, stream: Stream) -> None:
        """Operators are ready as far as torch_npu has them; the tables of replicas are made."""
        replica_tables_of(tables, stream)
        self._indices.draws(tables.experts, 0, 0, stream)

    def count(self, ids: Tensor, counts: Tensor, stream: Stream) -> None:
        """Tokens per expert."""
        check_count(ids, counts)

        def program() -> None:
            record_stream_use(stream, ids, counts)
            routing_ops.count_experts(ids, counts)

        stream.launch(program)

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        """Route by the draw of each token's place: 6 launches."""
        check_routing(ids, tables, salt.layer, slots, counts)
        replicas = replica_tables_of(tables, stream)
        begin = window_begin(salt.rank, salt.layer, salt.step)

        def program() -> None:
            record_stream_use(stream, ids, slots, counts)
            replicas.record_use(stream)
            draws = self._indices.draws(tables.experts, begin, ids.numel(), stream)
            routing_ops.route_hashed(ids, draws, replicas, salt.layer, slots)
            routing_ops.count_experts(ids, counts)

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
            record_stream_use(stream, ids, cumulative, slots, counts)
            table = routing_ops.live_table(tables, salt.layer)
            routing_ops.count_experts(ids, counts)
            copy(slots, routing_ops.route_apportioned(ids, table, cumulative, counts, salt))

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
        """Route so that the batch is level, by a function of the host that the stream calls."""
        check_routing(ids, tables, salt.layer, slots, counts)
        check_group(group, tables)
        on, count = own_stream(stream), ids.numel()
        sizes = tables.experts, tables.slots, tables.ranks
        function = RouteLevelled.of_batch(count, *sizes, grouped=group is not None)

        def program() -> None:
            record_stream_use(stream, ids, slots, counts)
            table = routing_ops.live_table(tables, salt.layer)
            routing_ops.count_experts(ids, counts)
            summed = () if group is None else (group.total, group.before)
            record_stream_use(stream, *summed)
            numbers = [ids.new_full((1,), number) for number in (count, salt.rank, salt.layer)]
            inputs = torch.cat([*numbers, table.start, table.replicas, *summed, ids])
            job = self._jobs.job(on, function)
            copy(job.inputs[: inputs.numel()], inputs)
            job.enqueue()
            copy(slots, job.result[:count])

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
        match rule:
            case RowHash():
                program = self._by_row(rule, ids, tables, layer, slots, counts, stream)
            case BlockTurns(offset):

                def program() -> None:
                    record_stream_use(stream, ids, slots, counts)
                    copy(
                        slots,
                        routing_ops.route_by_block_turns(
                            ids, routing_ops.live_table(tables, layer), offset
                        ),
                    )
                    routing_ops.count_experts(ids, counts)

        stream.launch(program)

    def _by_row(
        self,
        rule: RowHash,
        ids: Tensor,
        tables: Tables,
        layer: int,
        slots: Tensor,
        counts: Tensor,
        stream: Stream,
    ) -> Callable[[], None]:
        """A pass by vLLM's rule: 11 launches."""
        replicas = replica_tables_of(tables, stream)
        # Every expert has a replica, so that no other run can be longer.
        longest, size = tables.slots - tables.experts + 1, ids.numel()

        def program() -> None:
            record_stream_use(stream, ids, slots, counts, rule.rows)
            replicas.record_use(stream)
            turns = self._indices.turns(rule.top_k, longest, size, stream)
            numbers = self._indices.rows(rule.top_k, size, stream)
            kinds = routing_ops.route_by_row_hash(ids, turns, replicas, layer, slots)
            routing_ops.count_rows(kinds, numbers, rule.rows, counts)

        return program

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        """Water-filling on one layer's counts, by a function of the host that the stream calls."""
        check_solve_shares(counts, tables, layer, cumulative)
        on = own_stream(stream)
        function = SolveShares(tables.experts, tables.slots, tables.ranks)

        def program() -> None:
            record_stream_use(stream, counts, cumulative)
            table = routing_ops.live_table(tables, layer)
            inputs = torch.cat([counts.long(), table.start.long(), table.replicas.long()])
            job = self._jobs.job(on, function)
            copy(job.inputs, inputs)
            job.enqueue()
            shares = torch.empty_like(cumulative)
            copy(shares, job.result)
            # Before the first commit there is no order in which shares could be written.
            has_tables = tables.generation[layer : layer + 1] > 0
            copy(cumulative, torch.where(has_tables, shares, cumulative))

        stream.launch(program)

    def commit_tables(self, update: TableUpdate, tables: Tables, stream: Stream) -> None:
        """Fill the idle set of each changed layer, then advance its generation word.

        The update is taken at the call.
        """
        check_update(update, tables)
        block, positions = pack_table_update(update), slots_by_position(update)
        replicas = replica_tables_of(tables, stream)
        stream.launch(lambda: _install(block, positions, tables, replicas, stream))

    def checksum(self, data: Tensor, out: Tensor, stream: Stream) -> None:
        """Checksum of a contiguous tensor's bytes."""
        check_checksum(data, out)

        def program() -> None:
            record_stream_use(stream, data, out)
            copy(out[0], device_checksum(data))

        stream.launch(program)


def _install(
    block: Tensor, positions: Tensor, tables: Tables, replicas: ReplicaTables, stream: Stream
) -> None:
    """On the routing stream: the idle sets first, the words last (clause G2)."""
    rows, device_positions = (_on_device(part, tables) for part in (block, positions))
    widths = [1, tables.experts + 1, tables.slots, tables.slots]
    numbers, *parts = torch.split(rows, widths, dim=1)
    layers = numbers[:, 0].long()
    words = tables.generation.index_select(0, layers) + 1
    places = (words & 1) * tables.layers + layers
    for table, part in zip((tables.start, tables.replicas, tables.cumulative), parts, strict=True):
        table.view(2 * tables.layers, -1).index_copy_(0, places, part)
    replicas.record_use(stream)
    replicas.install(device_positions, parts[0], parts[1], layers, words)
    tables.generation.index_copy_(0, layers, words)


def _on_device(block: Tensor, tables: Tables) -> Tensor:
    device_block = torch.empty_like(block, device=tables.start.device, pin_memory=False)
    copy(device_block, block)
    return device_block
