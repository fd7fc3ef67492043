"""Metrics of a model with several layer groups, observed as docs/observability.md shows."""

from time import sleep
from typing import Any

import pytest
from helpers.harnesses.two_family_model import BUDGET, PER_RANK, RANKS, TARGET, settings
from helpers.processes.thread_ranks import GroupMember, on_ranks

from equipoise.balancer.experts.balancer import ExpertBalancer
from equipoise.balancer.experts.open import LayerGroupContext, ModelStart, open_balancers
from equipoise.balancer.experts.placement import Layout, even_shares, initial_placement
from equipoise.balancer.experts.runtime.events import StepDone, now
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.balancer.observe.async_sink import AsyncEventSink
from equipoise.balancer.observe.metrics import PrometheusSink
from equipoise.balancer.observe.trace_buffer import TraceBuffer

STEPS = 40
SLOW = 0.05
"""Seconds reported for a step during a rebalance; a step outside of one reports 0."""


class RankMetrics:
    """The metrics registry of a rank, with an event sink and a trace buffer for each engine."""

    def __init__(self, rank: int, registry: Any) -> None:
        self.rank = rank
        self.registry = registry
        self.sinks: dict[str, AsyncEventSink] = {}
        self.trace_buffers: dict[str, TraceBuffer] = {}

    def of(self, context: LayerGroupContext) -> AsyncEventSink:
        """Returns the event sink of one layer group."""
        name = f"{context.model.name}:{context.group_number}"
        self.trace_buffers[name] = TraceBuffer(self.rank)
        self.sinks[name] = AsyncEventSink(
            [PrometheusSink(self.registry, name), self.trace_buffers[name]]
        )
        return self.sinks[name]

    def value(self, metric: str, engine: str) -> float:
        """Reads a metric of an engine."""
        sample: float | None = self.registry.get_sample_value(metric, {"engine": engine})
        assert sample is not None
        return sample


def test_layer_groups_have_separate_metrics_in_one_registry() -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

    def program(member: GroupMember) -> RankMetrics:
        watch = RankMetrics(member.rank, client.CollectorRegistry())
        _serve(member, watch)
        return watch

    for watch in on_ranks(RANKS, program):
        assert set(watch.trace_buffers) == {"target:0", "target:1"}
        for name, buffer in watch.trace_buffers.items():
            assert watch.value("equipoise_rebalances_total", name) == len(buffer.rebalances) > 0
            stalls = [
                rebalance.stall_seconds
                for rebalance in buffer.rebalances
                if rebalance.stall_seconds is not None
            ]
            assert watch.value("equipoise_stall_seconds_total", name) > 0
            assert any(stall > 0 for stall in stalls)


def _serve(member: GroupMember, watch: RankMetrics) -> None:
    model = TARGET.model(member.rank, member.size)
    placement = initial_placement(model.shape(member.size))
    assert placement.shape[1] == RANKS * PER_RANK
    experts = int(placement.max()) + 1
    start = ModelStart(
        Layout(placement, even_shares(placement, experts)), settings(step_interval=8)
    )
    models = ModelSet((model,))
    balancers = open_balancers(
        member.accelerator,
        member.fabric,
        models,
        {"target": start},
        staging_bytes=BUDGET,
        event_sinks=watch.of,
    )
    target = balancers["target"]
    for step in range(STEPS):
        with target.step(step):
            sleep(0.002)
        # Step times are made up, so that the test does not depend on how fast this machine is.
        begin = now()
        length = SLOW if any(_is_rebalancing(group) for group in target.groups) else 0.0
        for sink in watch.sinks.values():
            sink.emit(StepDone(step, begin, begin + length))
    balancers.close()
    for sink in watch.sinks.values():
        sink.close()


def _is_rebalancing(group: ExpertBalancer) -> bool:
    """Returns whether the group's engine has a rebalance open."""
    return type(group.engine.state).__name__ != "Idle"
