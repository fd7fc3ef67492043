"""Families of a model, each watched through a courier of its own."""

from time import sleep
from typing import Any

import pytest
from helpers.harnesses.two_family_model import BUDGET, PER_RANK, RANKS, TARGET, settings
from helpers.processes.thread_ranks import Seat, on_ranks

from equipoise.balancer.experts.balancer import ExpertBalancer
from equipoise.balancer.experts.open import LayerGroupContext, ModelStart, open_balancers
from equipoise.balancer.experts.placement import Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import StepDone, now
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.balancer.observe.async_sink import AsyncEventSink
from equipoise.balancer.observe.metrics import PrometheusSink
from equipoise.balancer.observe.trace import TraceBuffer

STEPS = 40
SLOW = 0.05
"""Seconds that a step within an epoch is said to take; one outside takes none."""


class Watch:
    """A registry of a rank, and what its engines are told through."""

    def __init__(self, rank: int, registry: Any) -> None:
        self.rank = rank
        self.registry = registry
        self.couriers: dict[str, AsyncEventSink] = {}
        self.books: dict[str, TraceBuffer] = {}

    def of(self, berth: LayerGroupContext) -> AsyncEventSink:
        """The journal of one family."""
        name = f"{berth.model.name}:{berth.group_number}"
        self.books[name] = TraceBuffer(self.rank)
        self.couriers[name] = AsyncEventSink(
            [PrometheusSink(self.registry, name), self.books[name]]
        )
        return self.couriers[name]

    def value(self, metric: str, engine: str) -> float:
        """Of an engine."""
        found: float | None = self.registry.get_sample_value(metric, {"engine": engine})
        assert found is not None
        return found


def test_families_have_separate_metrics_in_one_registry() -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

    def program(seat: Seat) -> Watch:
        watch = Watch(seat.rank, client.CollectorRegistry())
        _serve(seat, watch)
        return watch

    for watch in on_ranks(RANKS, program):
        assert set(watch.books) == {"target:0", "target:1"}
        for name, book in watch.books.items():
            assert watch.value("equipoise_epochs_total", name) == len(book.rebalances) > 0
            stalls = [
                epoch.stall_seconds for epoch in book.rebalances if epoch.stall_seconds is not None
            ]
            assert watch.value("equipoise_stall_seconds_total", name) > 0
            assert any(stall > 0 for stall in stalls)


def _serve(seat: Seat, watch: Watch) -> None:
    model = TARGET.model(seat.rank, seat.size)
    placement = initial_placement(model.shape(seat.size))
    assert placement.shape[1] == RANKS * PER_RANK
    experts = int(placement.max()) + 1
    start = ModelStart(
        Layout(placement, even_shares(placement, experts)), settings(step_interval=8)
    )
    models = ModelSet((model,))
    balancers = open_balancers(
        seat.accelerator,
        seat.fabric,
        models,
        {"target": start},
        budget=BUDGET,
        journals=watch.of,
    )
    target = balancers["target"]
    for step in range(STEPS):
        with target.step(step):
            sleep(0.002)
        # A length of its own for each step: what is told is what counts, not this machine's haste.
        begin = now()
        length = SLOW if any(_within(group) for group in target.groups) else 0.0
        for courier in watch.couriers.values():
            courier.emit(StepDone(step, begin, begin + length))
    balancers.close()
    for courier in watch.couriers.values():
        courier.close()


def _within(group: ExpertBalancer) -> bool:
    """Whether an epoch of the group's engine is open."""
    return type(group.engine.state).__name__ != "Idle"
