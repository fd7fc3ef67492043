"""Routers: expert ids to slot ids on the step path, with the counts of rows.

Other engines' routing rules are here too, for comparisons and for moving over from them: both
divide an expert's rows evenly among its replicas, whatever shares are installed.
"""

from typing import Protocol

import torch
from torch import Tensor

from equipoise.balancer.experts.placement import (
    ExpertShape,
    Layout,
    Load,
    Shares,
    even_shares,
    solve_shares,
)
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.routing_rules import BlockTurns, ReplicaRule, RowHash
from equipoise.hal.stream import Role, Stream


class Router(Protocol):
    """One share mode."""

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Slot ids, int32 [n, top_k], for expert ids of the same shape; counts the load.

        Called from programs of `on`; the compute stream by default. An engine may have more streams
        than one, as when it captures its forward: those that call are ordered one behind the other
        by whoever owns them, for what routers keep between two launches is one of a kind.
        """
        ...

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """The shares by which tokens of such a load would be divided; for reports."""
        ...


class TableRouter:
    """Shares as the installed tables have them: static, or lagged when the engine renews them.

    Args:
        accelerator: whose kernels and compute stream are used.
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
        self._counts = _scratch(counters[0])

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Each token by the hash of its place."""
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
        """As installed."""
        return layout.shares


class ExactShareRouter:
    """Shares solved on this very batch: one all-reduce of the counts per layer and step.

    Args:
        accelerator: whose kernels and compute stream are used.
        communicator: used for nothing else.
        tables: the installed tables; their shares are not read.
        rank: enters the hash; ranks that route the same rows have the same.
        counters: int32 [layers, experts], to which every batch is added.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        tables: Tables,
        rank: int,
        counters: Tensor,
    ) -> None:
        self._kernels = accelerator.kernels
        self._compute = accelerator.stream(Role.COMPUTE)
        self._communicator = communicator
        self._tables = tables
        self._rank = rank
        self._counters = counters
        self._local = _scratch(counters[0])
        self._total = _scratch(counters[0], torch.int64)
        self._cumulative = _scratch(tables.cumulative[0, 0])

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Count, sum over ranks, solve, then apportion this rank's tokens."""
        stream = on or self._compute
        flat, slots = ids.view(-1), torch.empty_like(ids)
        self._kernels.count(flat, self._local, stream)
        stream.launch(lambda: self._total.copy_(self._local))
        self._communicator.all_reduce(self._total).wait(stream)
        self._kernels.solve_shares(self._total, self._tables, layer, self._cumulative, stream)
        self._kernels.route_apportioned(
            flat,
            self._tables,
            self._cumulative,
            Salt(self._rank, layer, step),
            slots.view(-1),
            self._local,
            stream,
        )
        stream.launch(lambda: self._counters[layer].add_(self._local))
        return slots

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """As solved on the load itself."""
        return solve_shares(load, layout.placement, shape)


def _scratch(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros like another tensor, made on the host: no stream can come before them."""
    return torch.zeros(like.shape, dtype=dtype or like.dtype).to(like.device)


ALL_ROWS = 2**31 - 1


class RowHashRouter:
    """vLLM's rule: the row of a token in the rank's own batch, and nothing else, decides.

    Args:
        accelerator: whose kernels and compute stream are used.
        tables: the installed tables; their shares are not read.
        counters: int32 [layers, experts], to which every batch is added.

    Attributes:
        rows: int32 [1], on the device: how many rows of a batch are counted, all of them at first.
            Who fills batches up writes it from a program of the compute stream.
    """

    def __init__(self, accelerator: Accelerator, tables: Tables, counters: Tensor) -> None:
        self._rule_router = _RuleRouter(accelerator, tables, counters)
        # Made on the host: no stream can come before it.
        self.rows = torch.full((1,), ALL_ROWS, dtype=torch.int32).to(counters.device)

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Slot ids, int32 [n, top_k]: the experts of a row take the same turn."""
        return self._rule_router.run(RowHash(ids.shape[-1], self.rows), layer, ids, on)

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Even ones."""
        return even_shares(layout.placement, shape.experts)


class BlockRoundRobinRouter:
    """TensorRT-LLM's rule: replicas in turn within a block of 1024 elements.

    Args:
        accelerator: whose kernels and compute stream are used.
        tables: the installed tables; their shares are not read.
        offset: where the turns begin: the rank where attention is data-parallel, else 0.
        counters: int32 [layers, experts], to which every batch is added.
    """

    def __init__(
        self, accelerator: Accelerator, tables: Tables, offset: int, counters: Tensor
    ) -> None:
        self._rule_router = _RuleRouter(accelerator, tables, counters)
        self._rule = BlockTurns(offset)

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Slot ids, int32 [n, top_k]."""
        return self._rule_router.run(self._rule, layer, ids, on)

    def shares(self, load: Load, layout: Layout, shape: ExpertShape) -> Shares:
        """Even ones."""
        return even_shares(layout.placement, shape.experts)


class _RuleRouter:
    """Passes by a rule; each is added to the counters."""

    def __init__(self, accelerator: Accelerator, tables: Tables, counters: Tensor) -> None:
        self._kernels = accelerator.kernels
        self._compute = accelerator.stream(Role.COMPUTE)
        self._tables = tables
        self._counters = counters
        # Made on the host: no stream can come before it.
        self._counts = torch.zeros(counters.shape[1], dtype=torch.int32).to(counters.device)

    def run(self, rule: ReplicaRule, layer: int, ids: Tensor, on: Stream | None) -> Tensor:
        """Slot ids for `ids`, of the same shape."""
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
