"""Exact shares under which rows stay on their rank, as far as level ranks allow."""

import torch
from torch import Tensor

from equipoise.balancer.experts.layout import Layout, solve_shares
from equipoise.balancer.experts.locality import local_cumulative
from equipoise.balancer.experts.placement import Load, Shape, Shares
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.stream import Role, Stream


class LocalRouter:
    """As `BatchRouter`, but the counts of all ranks are gathered instead of summed.

    Args:
        accelerator: whose kernels and compute stream are used.
        communicator: used for nothing else; its ranks are those that the slots lie on, in order.
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
        # On the host first: no stream can come before that.
        self._counts = torch.zeros(experts, dtype=torch.int32).to(device)
        self._every = torch.zeros(tables.ranks, experts, dtype=torch.int32).to(device)
        self._total = torch.zeros(experts, dtype=torch.int64).to(device)
        self._cumulative = torch.zeros(tables.slots, dtype=torch.int32).to(device)

    def route(self, layer: int, step: int, ids: Tensor, on: Stream | None = None) -> Tensor:
        """Count, gather over ranks, solve, keep at home what can be; then apportion."""
        stream = on or self._compute
        flat, slots = ids.view(-1), torch.empty_like(ids)
        salt = Salt(self._communicator.rank, layer, step)
        self._kernels.count(flat, self._counts, stream)
        self._communicator.all_gather(self._every, self._counts).wait(stream)
        stream.launch(self._sum)
        self._kernels.solve_shares(self._total, self._tables, layer, self._cumulative, stream)
        stream.launch(lambda: self._keep_at_home(salt))
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

    def shares(self, load: Load, layout: Layout, shape: Shape) -> Shares:
        """As solved on the load itself."""
        return solve_shares(load, layout.placement, shape)

    def _sum(self) -> None:
        torch.sum(self._every, 0, dtype=torch.int64, out=self._total)

    def _keep_at_home(self, salt: Salt) -> None:
        tables, layer = self._tables, salt.layer
        live = (tables.generation[layer] & 1).view(1)
        start = tables.start[:, layer].index_select(0, live)[0]
        replicas = tables.replicas[:, layer].index_select(0, live)[0]
        counts = self._every.long()
        self._cumulative.copy_(local_cumulative(counts, start, replicas, self._cumulative, salt))
