"""Keeps rows on their own rank, as far as level ranks allow.

The shares of a batch say how many rows of an expert each of its replicas takes, but not from which
rank. With the counts of all ranks, a rank's own rows go to its own replicas first, up to their
quotas. The remaining rows of the ranks, in rank order, fill the remaining quotas of the replicas,
in their order (the north-west corner rule of the transportation problem). No other assignment keeps
more rows on their rank, because this is the most that each rank's own replicas can take of its own
rows; and the load of every replica is unchanged, to the row.

Every rank computes the same assignment from the same counts, in integers, without communication.
The host is never synchronised: tensors stay on the device and have fixed shapes.

The assignment is exact up to 65,536 rows of one expert in one rank's batch. Beyond that, one or two
rows of each 65,536 may go to the next replica.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.balancer.experts.placement import (
    BatchCounts,
    ExpertShape,
    Layout,
    Load,
    RankRows,
    Shares,
    solve_shares,
)
from equipoise.balancer.experts.routing.layer_update import table_update
from equipoise.balancer.experts.routing.rank_rows import total_counts
from equipoise.balancer.experts.routing.routers import Router
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import MASK32, SHARE_BITS, SHARE_ONE, mix32
from equipoise.hal.stream import Role, Stream


@dataclass(frozen=True)
class ReplicaRuns:
    """A layer's slots by expert, and the runs of them that are on one rank.

    Attributes:
        expert: int64 [slots], the expert of each entry.
        rank: int64 [slots], the rank of each entry's slot.
        first_of_expert: bool [slots], whether an entry is the first of its expert.
        first_on_rank: bool [slots], whether it is the first of its expert on its rank.
    """

    expert: Tensor
    rank: Tensor
    first_of_expert: Tensor
    first_on_rank: Tensor

    @staticmethod
    def of(start: Tensor, replicas: Tensor, ranks: int) -> "ReplicaRuns":
        """Builds them from a layer's table: int32 [experts + 1] and [slots]."""
        slots = replicas.numel()
        place = torch.arange(slots, device=replicas.device)
        owner = torch.searchsorted(start[1:].long(), place, right=True)
        rank = torch.div(replicas.long(), slots // ranks, rounding_mode="floor")
        first = place == start.long()[owner]
        moved = torch.ones_like(first)
        moved[1:] = rank[1:] != rank[:-1]
        return ReplicaRuns(owner, rank, first, first | moved)

    def ends(self, amounts: Tensor) -> Tensor:
        """Returns inclusive sums of int64 [slots] within each expert."""
        return self._sums_since(amounts, self.first_of_expert)

    def before_on_rank(self, amounts: Tensor) -> Tensor:
        """Returns the sums over earlier entries of the same expert on the same rank."""
        return self._sums_since(amounts, self.first_on_rank) - amounts

    def _sums_since(self, amounts: Tensor, starts: Tensor) -> Tensor:
        sums = amounts.cumsum(0)
        before = torch.where(starts, sums - amounts, 0).cummax(0).values
        return sums - before


def local_first_shares(
    counts: Tensor, start: Tensor, replicas: Tensor, cumulative: Tensor, salt: Salt
) -> Tensor:
    """Returns shares by which one rank routes its batch so that as many rows as can be stay on it.

    Args:
        counts: int64 [ranks, experts], rows of every rank's batch.
        start: int32 [experts + 1], of the layer's table.
        replicas: int32 [slots], of the layer's table; the slots of a rank are contiguous.
        cumulative: int32 [slots], cumulative shares that level the ranks.
        salt: the salt of this rank and layer with which the batch will be routed.

    Returns:
        int32 [slots], for `route_apportioned` with the same salt.
    """
    runs = ReplicaRuns.of(start, replicas, counts.shape[0])
    quotas = _quotas(counts.sum(0), runs, cumulative, salt.layer)
    rows_kept = _rows_kept(counts, runs, quotas)
    slot_rows = _rows_of_others(counts, runs, quotas, rows_kept, salt.rank)
    slot_rows = slot_rows + torch.where(runs.rank == salt.rank, rows_kept, 0)
    return _as_shares(runs.ends(slot_rows), counts[salt.rank], runs, cumulative, salt)


def _quotas(total: Tensor, runs: ReplicaRuns, cumulative: Tensor, layer: int) -> Tensor:
    """Returns how many rows each replica takes, as `route_apportioned` would cut one batch."""
    # The same dither on all ranks, but another one per layer, so that roundings do not add up.
    dither = _dither(total, MASK32, layer)
    ends = (cumulative.long() * total[runs.expert] + dither[runs.expert]) >> SHARE_BITS
    before = torch.zeros_like(ends)
    before[1:] = ends[:-1]
    return ends - torch.where(runs.first_of_expert, 0, before)


def _rows_kept(counts: Tensor, runs: ReplicaRuns, quotas: Tensor) -> Tensor:
    """Returns how many rows each replica takes of its own rank's rows."""
    rows_on_rank = counts[runs.rank, runs.expert] - runs.before_on_rank(quotas)
    return torch.minimum(rows_on_rank.clamp(min=0), quotas)


def _rows_of_others(
    counts: Tensor, runs: ReplicaRuns, quotas: Tensor, rows_kept: Tensor, rank: int
) -> Tensor:
    """Returns how many rows each replica takes of those that `rank` cannot keep."""
    kept_by_rank = torch.zeros_like(counts).view(-1)
    kept_by_rank.index_add_(0, runs.rank * counts.shape[1] + runs.expert, rows_kept)
    rows_left = counts - kept_by_rank.view_as(counts)
    begins = rows_left[:rank].sum(0)[runs.expert]
    ends = begins + rows_left[rank][runs.expert]
    room = quotas - rows_kept
    filled = runs.ends(room)
    return (torch.minimum(ends, filled) - torch.maximum(begins, filled - room)).clamp(min=0)


def _as_shares(
    ends: Tensor, own_counts: Tensor, runs: ReplicaRuns, cumulative: Tensor, salt: Salt
) -> Tensor:
    """Returns the shares with which the kernel cuts `own_counts` at exactly `ends`.

    The kernel ends a replica's part at floor((share * n + dither) / 65536), so the smallest share
    that ends it at `end` is ceil((end * 65536 - dither) / n).
    """
    rows = own_counts[runs.expert]
    dither = _dither(own_counts, salt.rank, salt.layer)[runs.expert]
    divisor = rows.clamp(min=1)
    least = torch.div(ends * SHARE_ONE - dither + divisor - 1, divisor, rounding_mode="floor")
    shares = torch.where(ends == rows, SHARE_ONE, least.clamp(0, SHARE_ONE))
    return torch.where(rows == 0, cumulative.long(), shares).int()


def _dither(like: Tensor, rank: int, layer: int) -> Tensor:
    experts = torch.arange(like.numel(), device=like.device)
    return mix32(experts, rank, layer, 0) >> SHARE_BITS


class LocalFirstRouter(Router):
    """Divides the rows of all ranks by solved shares, a rank's own replicas first.

    Args:
        accelerator: provides the kernels and the compute stream.
        communicator: used by this router only; its ranks are those of the slots, in order.
        tables: the installed tables; their shares are not read.
        counters: int32 [layers, experts], to which every batch is added.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        tables: Tables,
        counters: Tensor,
    ) -> None:
        self._kernels = accelerator.kernels
        self._compute = accelerator.stream(Role.COMPUTE)
        self._communicator = communicator
        self._tables = tables
        self._counters = counters
        device, experts = counters.device, tables.experts
        # Zeroed on the host and then copied, so that no stream can run before that.
        self._counts = torch.zeros(experts, dtype=torch.int32).to(device)
        self._counts_by_rank = torch.zeros(tables.ranks, experts, dtype=torch.int32).to(device)
        self._total = torch.zeros(experts, dtype=torch.int64).to(device)
        self._cumulative = torch.zeros(tables.slots, dtype=torch.int32).to(device)

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Counts, gathers the counts of all ranks, solves shares, prefers own rows, apportions."""
        stream = on or self._compute
        flat, slots = ids.view(-1), torch.empty_like(ids)
        salt = Salt(self._communicator.rank, layer, step)
        self._kernels.count(flat, self._counts, stream)
        self._communicator.all_gather(self._counts_by_rank, self._counts).wait(stream)
        stream.launch(self._sum)
        self._kernels.solve_shares(self._total, self._tables, layer, self._cumulative, stream)
        stream.launch(lambda: self._prefer_local(salt))
        self._kernels.route_apportioned(
            flat,
            self._tables,
            self._cumulative,
            salt,
            slots.view(-1),
            self._counts,
            stream,
        )
        stream.launch(lambda: self._counters[layer].add_(self._counts))
        return slots

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Returns shares solved on the load itself."""
        return solve_shares(load, layout.placement, shape)

    def rank_rows(
        self, counts: BatchCounts, layout: Layout, shape: ExpertShape, step: int
    ) -> RankRows:
        """Returns the quotas of the ranks: which of its rows a rank keeps does not change them."""
        total = total_counts(counts)
        solved = replace(layout, shares=solve_shares(total, layout.placement, shape))
        tables = table_update(solved, shape, range(shape.layers))
        rank_rows = torch.zeros(shape.layers, shape.ranks, dtype=torch.int64)
        for layer, rows in enumerate(torch.from_numpy(total)):
            runs = ReplicaRuns.of(tables.start[layer], tables.replicas[layer], shape.ranks)
            quotas = _quotas(rows, runs, tables.cumulative[layer], layer)
            rank_rows[layer].index_add_(0, runs.rank, quotas)
        return rank_rows.numpy()

    def _sum(self) -> None:
        torch.sum(self._counts_by_rank, 0, dtype=torch.int64, out=self._total)

    def _prefer_local(self, salt: Salt) -> None:
        tables, layer = self._tables, salt.layer
        set_index = (tables.generation[layer] & 1).view(1)
        start = tables.start[:, layer].index_select(0, set_index)[0]
        replicas = tables.replicas[:, layer].index_select(0, set_index)[0]
        counts = self._counts_by_rank.long()
        self._cumulative.copy_(local_first_shares(counts, start, replicas, self._cumulative, salt))
