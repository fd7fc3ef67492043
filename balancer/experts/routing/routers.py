"""Routers: map expert ids to slot ids in a step, and count rows.

Routing rules of other engines are here too, for comparison and migration: they divide an expert's
rows evenly among its replicas and ignore shares.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from equipoise.balancer.experts.placement import (
    BatchCounts,
    ExpertShape,
    Layout,
    Load,
    RankRows,
    Shares,
    even_shares,
)
from equipoise.balancer.experts.routing.drawn_rows import drawn_rank_rows
from equipoise.balancer.experts.routing.rank_rows import even_rank_rows
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing import DispatchCounts
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash
from equipoise.hal.stream import Role, Stream


class Router(Protocol):
    """Routes rows in one share mode."""

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Returns slot ids, int32 [n, top_k], for expert ids of the same shape; counts the load.

        Launched on `on`, by default the compute stream. If an engine uses several streams, as for
        the capture of its forward pass, it has to order them: a router has only one set of buffers
        between two launches.
        """
        ...

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Returns the shares by which rows of such a load are divided; for reports."""
        ...

    def rank_rows(
        self, counts: BatchCounts, layout: Layout, shape: ExpertShape, step: int
    ) -> RankRows:
        """Returns the rows that each rank got of the batches of a step; for reports.

        `layout` is the one that the step was routed with. Any thread may call.
        """
        ...

    def dispatch_counts(self, layer: int) -> DispatchCounts | None:
        """Returns what all ranks send by the last `route`, which was of this layer.

        None where a router does not know it, as most: the exchange then tells sizes itself. The
        answer is the same kind on all ranks. Called before the next `route`, by the same thread.
        """
        return None


class TableRouter(Router):
    """Routes by the shares of the installed tables: static, or lagged if the engine updates them.

    Args:
        accelerator: its kernels and compute stream are used.
        tables: the installed tables.
        rank: enters the hash.
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
        """Routes each row by a hash of its position."""
        stream, slots = on or self._compute, torch.empty_like(ids)
        self._kernels.route_and_count(
            ids.view(-1),
            self._tables,
            Salt(self._rank, layer, step),
            slots.view(-1),
            self._counts,
            stream,
        )
        stream.launch(lambda: self._counters[layer].add_(self._counts))
        return slots

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Returns the installed shares."""
        return layout.shares

    def rank_rows(
        self, counts: BatchCounts, layout: Layout, shape: ExpertShape, step: int
    ) -> RankRows:
        """Returns a draw by the installed shares."""
        return drawn_rank_rows(counts, layout, shape, step)


def scratch(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns zeros like another tensor.

    They are made on the host, so that no stream can use them before they are written.
    """
    return torch.zeros(like.shape, dtype=dtype or like.dtype).to(like.device)


ALL_ROWS = 2**31 - 1


class RowHashRouter(Router):
    """Routes by vLLM's rule: only the row of a token in the rank's batch decides.

    Args:
        accelerator: its kernels and compute stream are used.
        tables: the installed tables; their shares are not read.
        counters: int32 [layers, experts], to which every batch is added.

    Attributes:
        rows: int32 [1], on the device: number of counted rows of a batch, at first all. An engine
            that pads batches writes it from a program of the compute stream.
    """

    def __init__(self, accelerator: Accelerator, tables: Tables, counters: Tensor) -> None:
        self._rule_router = _RuleRouter(accelerator, tables, counters)
        # Made on the host, so that no stream can use it before it is written.
        self.rows = torch.full((1,), ALL_ROWS, dtype=torch.int32).to(counters.device)

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Returns slot ids, int32 [n, top_k]; all experts of a row use the same replica number."""
        return self._rule_router.run(RowHash(ids.shape[-1], self.rows), layer, ids, on)

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Returns even shares."""
        return even_shares(layout.placement, shape.experts)

    def rank_rows(
        self, counts: BatchCounts, layout: Layout, shape: ExpertShape, step: int
    ) -> RankRows:
        """Returns a draw by even shares."""
        even = replace(layout, shares=even_shares(layout.placement, shape.experts))
        return drawn_rank_rows(counts, even, shape, step)


class BlockRoundRobinRouter(Router):
    """Routes by TensorRT-LLM's rule: replicas in turn within a block of 1024 elements.

    Args:
        accelerator: its kernels and compute stream are used.
        tables: the installed tables; their shares are not read.
        offset: first turn: the rank if attention is data-parallel, else 0.
        counters: int32 [layers, experts], to which every batch is added.
    """

    def __init__(
        self, accelerator: Accelerator, tables: Tables, offset: int, counters: Tensor
    ) -> None:
        self._rule_router = _RuleRouter(accelerator, tables, counters)
        self._rule = BlockTurns(offset)

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Returns slot ids, int32 [n, top_k]."""
        return self._rule_router.run(self._rule, layer, ids, on)

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Returns even shares."""
        return even_shares(layout.placement, shape.experts)

    def rank_rows(
        self, counts: BatchCounts, layout: Layout, shape: ExpertShape, step: int
    ) -> RankRows:
        """Returns the rows of turns; which replica begins is not known, a row of each expert."""
        return even_rank_rows(counts, layout, shape)


class _RuleRouter:
    """Routes by a rule, and adds the counts of each batch to the counters."""

    def __init__(self, accelerator: Accelerator, tables: Tables, counters: Tensor) -> None:
        self._kernels = accelerator.kernels
        self._compute = accelerator.stream(Role.COMPUTE)
        self._tables = tables
        self._counters = counters
        # Made on the host, so that no stream can use it before it is written.
        self._counts = torch.zeros(counters.shape[1], dtype=torch.int32).to(counters.device)

    def run(self, rule: ReplicaRule, layer: int, ids: Tensor, on: Stream | None) -> Tensor:
        """Returns slot ids for `ids`, of the same shape."""
        stream, slots = on or self._compute, torch.empty_like(ids)
        self._kernels.route_by_rule(
            rule,
            ids.view(-1),
            self._tables,
            layer,
            slots.view(-1),
            self._counts,
            stream,
        )
        stream.launch(lambda: self._counters[layer].add_(self._counts))
        return slots
