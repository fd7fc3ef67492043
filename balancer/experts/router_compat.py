"""Other engines' routing rules on the step path, for comparisons and for moving over.

Both divide an expert's tokens evenly among its replicas, whatever shares are installed.
"""

import torch
from torch import Tensor

from equipoise.balancer.experts.layout import Layout, even_shares
from equipoise.balancer.experts.placement import Load, Shape, Shares
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.kernels import Tables
from equipoise.hal.routing_rules import BlockTurns, RowHash, Rule
from equipoise.hal.stream import Role, Stream

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
        self._passes = _Passes(accelerator, tables, counters)
        # Made on the host: no stream can come before it.
        self.rows = torch.full((1,), ALL_ROWS, dtype=torch.int32).to(counters.device)

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Slot ids, int32 [n, top_k]: the experts of a row take the same turn."""
        return self._passes.run(RowHash(ids.shape[-1], self.rows), layer, ids, on)

    def shares(self, load: Load, layout: Layout, shape: Shape) -> Shares:
        """Even ones."""
        return even_shares(layout.placement, shape.experts)


class BlockTurnRouter:
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
        self._passes = _Passes(accelerator, tables, counters)
        self._rule = BlockTurns(offset)

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Slot ids, int32 [n, top_k]."""
        return self._passes.run(self._rule, layer, ids, on)

    def shares(self, load: Load, layout: Layout, shape: Shape) -> Shares:
        """Even ones."""
        return even_shares(layout.placement, shape.experts)


class _Passes:
    """Passes by a rule; each is added to the counters."""

    def __init__(self, accelerator: Accelerator, tables: Tables, counters: Tensor) -> None:
        self._kernels = accelerator.kernels
        self._compute = accelerator.stream(Role.COMPUTE)
        self._tables = tables
        self._counters = counters
        # Made on the host: no stream can come before it.
        self._counts = torch.zeros(counters.shape[1], dtype=torch.int32).to(counters.device)

    def run(self, rule: Rule, layer: int, ids: Tensor, on: Stream | None) -> Tensor:
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
