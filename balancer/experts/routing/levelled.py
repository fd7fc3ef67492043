"""Routers that level each batch in the step: by itself, or with those of other ranks.

A batch is divided so that every rank gets as many of its rows (`equipoise.hal.levelled_routing`).
If every rank does that, the sum is level too, whatever the batches look like; ranks without rows do
not matter, and a captured graph replays it.
"""

import torch
from torch import Tensor

from equipoise import _native
from equipoise.balancer.experts.placement import (
    BatchCounts,
    ExpertShape,
    Layout,
    Load,
    RankRows,
    Shares,
    solve_shares,
)
from equipoise.balancer.experts.routing.rank_rows import levelled_rank_rows
from equipoise.balancer.experts.routing.routers import Router, scratch
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import EngineError
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.levelled_routing import GroupCounts
from equipoise.hal.routing import DispatchCounts
from equipoise.hal.stream import Role, Stream
from equipoise.hal.work import Work


class LocalShareRouter(Router):
    """Levels the rank's own batch: one kernel, and nothing of other ranks.

    Args:
        accelerator: its kernels and compute stream are used.
        tables: the installed tables; their shares are not read.
        rank: enters the rounding; ranks that route the same rows have the same.
        counters: int32 [layers, experts], to which every batch is added.
    """

    def __init__(
        self, accelerator: Accelerator, tables: Tables, rank: int, counters: Tensor
    ) -> None:
        self._kernels = accelerator.kernels
        self._compute = accelerator.stream(Role.COMPUTE)
        self._tables = tables
        self._rank = rank
        self._counters = counters
        self._counts = scratch(counters[0])

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Divides this rank's rows so that every rank gets as many of them."""
        stream, slots = on or self._compute, torch.empty_like(ids)
        self._kernels.route_levelled(
            ids.view(-1),
            self._tables,
            Salt(self._rank, layer, step),
            None,
            slots.view(-1),
            self._counts,
            stream,
        )
        stream.launch(lambda: self._counters[layer].add_(self._counts))
        return slots

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Returns the shares that level such a load: what batches add up to at best.

        What a rank cannot level of its own batch is not in it: `rank_rows` has that.
        """
        return solve_shares(load, layout.placement, shape)

    def rank_rows(
        self, counts: BatchCounts, layout: Layout, shape: ExpertShape, step: int
    ) -> RankRows:
        """Returns the rows of each batch divided by itself."""
        return levelled_rank_rows(counts, layout, shape)


class GroupShareRouter(Router):
    """Levels the batches of several ranks together: they gather their counts for each layer.

    Every rank divides the same sum in the same way; its own rows are those after the rows of the
    ranks before it. So the rows that a replica gets are those of its quota, and no rank rounds by
    itself.

    If the group is all ranks, the counts say what every rank sends to every slot. The generation
    of the tables is gathered with them, so that an exchange needs no collective for its sizes
    (`dispatch_counts`). Ranks that share rows are left out of this: which of them sends a row is
    not the router's to know.

    Args:
        accelerator: its kernels and compute stream are used.
        communicator: of the ranks of the group, in their order; used by this router only.
        tables: the installed tables; their shares are not read.
        group: this group's number, the node's or 0; enters the rounding.
        counters: int32 [layers, experts], to which every batch is added.
        deadline: seconds that `dispatch_counts` waits for the counts of other ranks.
        ranks_sharing_rows: number of neighbouring ranks that route the same rows, a divisor of the
            group's ranks: their rows are counted once.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        tables: Tables,
        group: int,
        counters: Tensor,
        deadline: float,
        ranks_sharing_rows: int = 1,
    ) -> None:
        self._kernels = accelerator.kernels
        self._compute = accelerator.stream(Role.COMPUTE)
        self._communicator = communicator
        self._tables = tables
        self._number = group
        self._counters = counters
        self._deadline = deadline
        self._sums = GroupCounts(scratch(counters[0]), scratch(counters[0]))
        # What a rank sends: its counts, int32, then the generation in an int64 word of its own. In
        # this order the counts are aligned as memory of their own would be, which kernels are
        # compiled for. Zeroed on the host, so that no stream can use it before.
        words = (tables.experts + 1) // 2 + 1
        gathered = torch.zeros(communicator.size, words, dtype=torch.int64).to(counters.device)
        self._gathered, self._sent = gathered, scratch(gathered[0])
        self._counts = _counts_in(self._sent, tables.experts)
        self._counts_of_batches = _counts_in(gathered, tables.experts)[::ranks_sharing_rows]
        self._place = communicator.rank // ranks_sharing_rows
        self._knows_all_rows = ranks_sharing_rows == 1 and communicator.size == tables.ranks
        self._last_gather: tuple[int, Work] | None = None

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Counts rows, gathers the counts of the group, then divides this rank's part of them."""
        stream = on or self._compute
        flat, slots = ids.view(-1), torch.empty_like(ids)
        self._kernels.count(flat, self._counts, stream)
        if self._knows_all_rows:
            word = self._tables.generation[layer : layer + 1]
            stream.launch(lambda: self._sent[-1:].copy_(word))
        gather = self._communicator.all_gather(self._gathered, self._sent)
        gather.wait(stream)
        if self._knows_all_rows:
            self._last_gather = layer, gather
        stream.launch(self._sum)
        self._kernels.route_levelled(
            flat,
            self._tables,
            Salt(self._number, layer, step),
            self._sums,
            slots.view(-1),
            self._counts,
            stream,
        )
        stream.launch(lambda: self._counters[layer].add_(self._counts))
        return slots

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Returns the shares that level such a load."""
        return solve_shares(load, layout.placement, shape)

    def rank_rows(
        self, counts: BatchCounts, layout: Layout, shape: ExpertShape, step: int
    ) -> RankRows:
        """Returns the rows of each group's batches divided as one."""
        groups = len(counts) // len(self._counts_of_batches)
        return levelled_rank_rows(counts, layout, shape, groups)

    def dispatch_counts(self, layer: int) -> DispatchCounts | None:
        """Returns what all ranks send by the last `route`; waits for its counts, on the host.

        None if the group is not all ranks, or ranks share rows.

        Raises:
            EngineError: the last `route` was of another layer, or there was none.
            CommunicatorError: the counts did not come within the deadline.
        """
        if not self._knows_all_rows:
            return None
        if self._last_gather is None or self._last_gather[0] != layer:
            last = "none" if self._last_gather is None else f"layer {self._last_gather[0]}"
            raise EngineError(
                f"dispatch_counts of layer {layer} follows its route; routed last: {last}"
            )
        self._last_gather[1].result(self._deadline)
        gathered, tables = self._gathered.cpu(), self._tables
        generations = tuple(gathered[:, -1].tolist())
        live = generations[self._communicator.rank] & 1, layer
        rows = torch.empty(len(gathered), tables.slots, dtype=torch.int64)
        _native.levelled_group_rows(
            _counts_in(gathered, tables.experts).contiguous(),
            tables.start[live].cpu(),
            tables.replicas[live].cpu(),
            tables.ranks,
            self._number,
            layer,
            rows,
        )
        return DispatchCounts(rows, generations)

    def _sum(self) -> None:
        batches = self._counts_of_batches
        torch.sum(batches, 0, dtype=torch.int32, out=self._sums.total)
        torch.sum(batches[: self._place], 0, dtype=torch.int32, out=self._sums.before)


def _counts_in(words: Tensor, experts: int) -> Tensor:
    """Returns the counts, int32 [..., experts], in what ranks send each other."""
    return words.view(torch.int32)[..., :experts]
