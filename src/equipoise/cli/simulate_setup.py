"""From what `equipoise simulate` was asked for to what is compared, and on what."""

from dataclasses import dataclass, replace
from typing import Any

from equipoise.balancer.requests.cluster import PER_TOKEN, Cluster, Drafting, Prefill, StepTime
from equipoise.balancer.requests.comparison import Contender, Draw, Trial, contenders
from equipoise.balancer.requests.generators import generate
from equipoise.balancer.requests.rules import WhenFull
from equipoise.balancer.requests.simulation import Saturated, Scenario, Timed
from equipoise.balancer.requests.step_times import published
from equipoise.balancer.requests.traces import read_trace
from equipoise.balancer.requests.workload import Workload
from equipoise.cli.offline import refused, warn
from equipoise.cli.simulate_kinds import SATURATED
from equipoise.cli.simulate_options import SimulateRequest
from equipoise.cli.simulate_validation import chosen_policies
from equipoise.hal.errors import UsageError
from equipoise.report.simulation.seen import KEPT, TRAJECTORY

REQUESTS_PER_SLOT = 40
FIXED_SHARE, ACCEPTANCE = 0.5, 0.7
SAMPLED = {
    "bootstrap": "each seed draws as many requests of the trace with replacement (bootstrap)",
    "shuffled": "each seed shuffles the order of the trace",
    "recorded": "each seed has the trace in its order; {}",
    "drawn": "each seed draws requests of its own",
}


@dataclass(frozen=True)
class Staged:
    """What is compared on what.

    Attributes:
        trial: workloads, seeds, cluster.
        entered: the contenders.
        sampling: what seeds differ in, in words.
        arrivals: how requests come, in words.
    """

    trial: Trial
    entered: tuple[Contender, ...]
    sampling: str
    arrivals: str


def load_trace(request: SimulateRequest) -> Workload | None:
    """The trace, cut as asked for. Raises UsageError where it cannot be read, or has no hashes."""
    if request.trace is None:
        return None
    with refused("--trace"):
        # Rows of a trace may be dropped, or hold several requests each.
        found = read_trace(request.trace, request.format, request.requests)
    if request.requests is not None and found.count < request.requests:
        warn(f"--requests {request.requests}: {request.trace} gave {found.count}")
    elif request.requests is not None:
        found = found.take(request.requests)
    if request.cached_blocks and found.hashes is None:
        raise UsageError(f"--cached-blocks: {request.trace} has no hashes of prompts")
    return _limited(request, found)


def stage(request: SimulateRequest, trace: Workload | None) -> Staged:
    """Raises UsageError for a cluster or times that cannot be."""
    sampling = _sampling(request)
    share = FIXED_SHARE if request.fixed_share is None else request.fixed_share
    trial = Trial(
        draw=_drawn(request) if trace is None else _of_trace(trace, sampling),
        seeds=range(request.seed, request.seed + request.seeds),
        scenario=_scenario(request),
        fixed_share=share if request.step_model == "share" else None,
        load=request.offered,
        own_times=request.arrivals == "trace",
    )
    times = "times of arrival are drawn" if _poisson(request) else "they differ in what is drawn"
    words = SAMPLED[sampling].format(times)
    return Staged(trial, _contenders(request), words, _arrivals(request))


def _limited(request: SimulateRequest, workload: Workload) -> Workload:
    limit = request.prompt_limit
    return workload if limit is None else workload.with_prompt_limit(limit)


def _drawn(request: SimulateRequest) -> Draw:
    assert request.workload is not None
    name = request.workload
    count = request.requests or REQUESTS_PER_SLOT * request.workers * request.slots_per_worker
    return lambda seed: _limited(request, generate(name, count, seed))


def _of_trace(trace: Workload, sampling: str) -> Draw:
    if sampling == "bootstrap":
        return trace.resampled
    return trace.shuffled if sampling == "shuffled" else lambda seed: trace


def _sampling(request: SimulateRequest) -> str:
    if request.trace is None:
        return "drawn"
    if request.sampling is not None:
        return request.sampling
    if not request.cached_blocks:
        return "bootstrap"
    # Neighbours share prefixes: the order is kept where seeds differ in something else.
    return "recorded" if _poisson(request) else "shuffled"


def _poisson(request: SimulateRequest) -> bool:
    return request.offered is not None and request.arrivals != "trace"


def _own_times(request: SimulateRequest) -> bool:
    return request.offered is None and request.load != SATURATED and request.arrivals == "trace"


def _arrivals(request: SimulateRequest) -> str:
    if request.offered is not None:
        how = "at the trace's times, stretched," if request.arrivals == "trace" else "at random"
        return f"requests come {how} at {request.offered:g} of the capacity"
    if _own_times(request):
        return "requests come at the trace's own times"
    return "saturated: as soon as one request is served, another comes"


def _scenario(request: SimulateRequest) -> Scenario:
    late = request.report_every
    return Scenario(
        cluster=_cluster(request),
        arrivals=Timed() if _own_times(request) else Saturated(),
        front_ends=request.front_ends,
        report_every=None if late is None else late / 1e3,
        tell_every=request.tell_every / 1e3,
        patience=request.patience,
        trajectory=max(TRAJECTORY, KEPT // request.workers),
    )


def _cluster(request: SimulateRequest) -> Cluster:
    chunk, drafts = request.prefill_chunk, request.drafts
    acceptance = ACCEPTANCE if request.acceptance is None else request.acceptance
    return Cluster(
        workers=request.workers,
        slots=request.slots_per_worker,
        kv_tokens=request.kv_tokens,
        step=_step(request),
        prefill=None
        if chunk is None
        else Prefill(chunk=chunk, cached_blocks=request.cached_blocks),
        drafting=None if drafts is None else Drafting(tokens=drafts, acceptance=acceptance),
    )


def _step(request: SimulateRequest) -> StepTime:
    rate = PER_TOKEN if request.seconds_per_token is None else request.seconds_per_token
    step = StepTime(per_token=rate)
    if request.step_model != "share":
        step = published(request.step_model, request.slots_per_worker, rate)
    return replace(step, prompt_weight=request.prompt_weight, noise=request.noise)


def _contenders(request: SimulateRequest) -> tuple[Contender, ...]:
    said = {key: getattr(request, key) for key in ("window", "ageing", "slack", "gather")}
    settings: dict[str, Any] = {key: value for key, value in said.items() if value is not None}
    settings["when_full"] = WhenFull(request.when_full)
    settings["prompt_weight"] = request.prompt_weight
    return tuple(
        replace(contender, policy=replace(contender.policy, **settings))
        for contender in contenders(chosen_policies(request.policies))
    )
