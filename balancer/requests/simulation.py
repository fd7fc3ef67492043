"""Simulates one policy on one workload, in the native simulator."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from sys import maxsize
from typing import TypeAlias

import numpy as np

from equipoise import _native
from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.simulation_run import SimulationRun
from equipoise.balancer.requests.workload import Workload
from equipoise.hal.errors import PolicyError, UsageError

ProgressCallback: TypeAlias = Callable[[int], None]
"""Called between batches of steps with the number of ended requests."""
BACKLOG_PER_WORKER = 4
"""Default number of waiting requests per worker in a saturated run."""
STEPS_PER_CALL = 4096
"""Steps between two calls of the progress callback: the call into C++ cannot be interrupted."""


@dataclass(frozen=True)
class SaturatedArrivals:
    """Closed loop: when a request is admitted, another arrives; the workload's times are not used.

    `backlog` requests always wait, in the pool and in the workers' queues together; None: four per
    worker.
    """

    backlog: int | None = None

    def __post_init__(self) -> None:
        if self.backlog is not None and self.backlog < 1:
            raise UsageError(f"a backlog is 1 or more requests, not {self.backlog}")


@dataclass(frozen=True)
class TimedArrivals:
    """Requests arrive at the times of the workload."""


Arrivals: TypeAlias = SaturatedArrivals | TimedArrivals


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that is simulated except the workload.

    Attributes:
        cluster: the workers.
        policy: settings of every front end's policy.
        arrivals: how requests arrive.
        front_ends: number of front ends, which get requests in turn.
        report_interval: seconds between reports of workers; None: as in the policy's publication;
            0: before every decision.
        token_delay: seconds between updates of a front end on its requests' tokens and ends; 0: at
            every step.
        queue_timeout: seconds after which a waiting request is aborted; None: never.
        trajectory: number of first steps of which the load of every worker is kept.
        seed: seed of the simulation and, with the front end's number, of policies that draw.
    """

    cluster: Cluster = field(default_factory=Cluster)
    policy: RoutingPolicySettings = field(default_factory=RoutingPolicySettings)
    arrivals: Arrivals = field(default_factory=SaturatedArrivals)
    front_ends: int = 1
    report_interval: float | None = None
    token_delay: float = 0.0
    queue_timeout: float | None = None
    trajectory: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.front_ends < 1 or self.trajectory < 0 or not 0 <= self.seed < 1 << 64:
            raise UsageError(f"front ends are 1 or more, trajectory and seed 0 or more: {self}")
        for name in ("report_interval", "token_delay", "queue_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < inf:
                raise UsageError(f"{name} is in seconds, 0 or more, not {seconds}")


def simulate(
    workload: Workload, scenario: Scenario, progress: ProgressCallback | None = None
) -> SimulationRun:
    """Runs until every request has ended or failed.

    Raises PolicyError for settings without a policy; UsageError for timed arrivals if the workload
    has no times.
    """
    settings = _native_settings(scenario)
    if isinstance(scenario.arrivals, TimedArrivals) and workload.arrivals is None:
        raise UsageError(f"{workload.name} has no times of arrival: give a load, or saturate")
    arrivals = workload.arrivals
    if arrivals is None or isinstance(scenario.arrivals, SaturatedArrivals):
        arrivals = np.zeros(workload.count)
    no_ids = np.zeros(0, dtype=np.int64)
    hashes, offsets = workload.hashes or (no_ids, no_ids)
    settings.block_tokens = workload.block
    try:
        run = _native.Simulation(
            settings, workload.prompts, workload.outputs, arrivals, hashes, offsets
        )
    except ValueError as error:
        raise PolicyError(str(error)) from error
    while run.run(STEPS_PER_CALL):
        if progress is not None:
            progress(run.done())
    weights = run.fitted_prompt_weights()
    return SimulationRun.of(workload, scenario.cluster, run.jobs(), run.steps(), weights)


def _native_settings(scenario: Scenario) -> _native.SimulationSettings:
    cluster, settings = scenario.cluster, _native.SimulationSettings()
    settings.policy, settings.server = scenario.policy.native(), _native_server(cluster)
    settings.workers, settings.front_ends = cluster.workers, scenario.front_ends
    settings.slots = list(cluster.worker_slots)
    step = cluster.step
    settings.fixed, settings.noise = step.fixed, step.noise
    settings.per_token, settings.per_mean = step.per_token, step.per_mean
    settings.prompt_weight = step.prompt_weight
    if isinstance(scenario.arrivals, SaturatedArrivals):
        settings.backlog = scenario.arrivals.backlog or BACKLOG_PER_WORKER * cluster.workers
    default_interval = scenario.policy.info.report_interval
    settings.report_interval = (
        default_interval if scenario.report_interval is None else scenario.report_interval
    )
    settings.token_delay = scenario.token_delay
    settings.queue_timeout = scenario.queue_timeout or 0.0
    settings.cached_blocks = 0 if cluster.prefill is None else cluster.prefill.cached_blocks
    if cluster.prefill is not None and cluster.prefill.alignment is not None:
        alignment = cluster.prefill.alignment
        settings.prefill_rule, settings.prefill_limit = alignment.rule.value, alignment.limit
    settings.trajectory, settings.seed = scenario.trajectory, scenario.seed
    return settings


def _native_server(cluster: Cluster) -> _native.ServerSettings:
    server = _native.ServerSettings()
    server.room = maxsize if cluster.kv_tokens is None else cluster.kv_tokens
    server.prefill_chunk = 0 if cluster.prefill is None else cluster.prefill.chunk
    if cluster.drafting is not None:
        server.drafts, server.acceptance = cluster.drafting.tokens, cluster.drafting.acceptance
    return server
