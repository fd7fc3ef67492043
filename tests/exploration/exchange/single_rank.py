"""One rank that exchanges with itself, for tests of single operations."""

from dataclasses import dataclass, field, replace
from typing import Any

from exploration.exchange.case import PLAIN, Case
from exploration.exchange.rank_program import Script

from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.backends.virtual.world import VirtualWorld
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all.fixed_capacity import (
    FixedCapacityExchange,
    FixedCombineHandle,
    FixedDispatchHandle,
)
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels
from equipoise.pipeline.all_to_all.transport import AllRanksTransport

SOON = 2.0
"""Nominal seconds: in a virtual world time passes only when nothing can move."""
CASE = replace(PLAIN, size=1, steps=[[[[[0, 1], [1, 2]]], [[[1, 1]]], [[]], [[[0, 2]]]]])


@dataclass
class Bench:
    """One rank that exchanges with itself, and moves at once.

    Attributes:
        world: where.
        script: makes its batches.
        sent: handles of dispatches, by batch.
        back: handles of combines, by batch.
    """

    world: VirtualWorld
    script: Script
    sent: dict[int, FixedDispatchHandle] = field(default_factory=dict)
    back: dict[int, FixedCombineHandle] = field(default_factory=dict)

    @property
    def exchange(self) -> FixedCapacityExchange:
        return self.script.exchange

    def stream(self, number: int = 0) -> Any:
        return self.script.accelerator.stream(list(Role)[number])

    def dispatch(self, number: int, stream: int = 0) -> None:
        self.sent[number] = self.exchange.dispatch(
            self.script.batch(0, number), self.stream(stream)
        )

    def combine(self, number: int, stream: int = 0) -> None:
        """Experts compute on what the arrivals hold, whether or not anybody waited for them."""
        arrivals = self.sent[number]._tracker._buffers.received
        rows = self.script.expert(arrivals)
        self.back[number] = self.sent[number].combine(rows, self.stream(stream))

    def launched(self) -> int:
        return sum(stream._launched for stream in self.world.device(0).streams)


def bench(case: Case = CASE) -> Bench:
    world = VirtualBackend().alone()
    accelerator, form = world.accelerator(0), case.form()
    transport = AllRanksTransport(world.fabric(0).open("experts"), accelerator, SOON)
    kernels = TorchKernels(form, transport, lambda n: world.empty(0, n).zero_())
    exchange = FixedCapacityExchange(form, kernels, accelerator)
    return Bench(world, Script(case, 0, exchange, accelerator, lambda n: world.empty(0, n)))
