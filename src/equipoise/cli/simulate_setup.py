"""Checks a request of `equipoise simulate` and turns it into workloads, cluster and policies.

Everything that can be refused without reading a file is refused first, each in one line.
"""

from dataclasses import dataclass, replace
from typing import Any

from equipoise.balancer.requests.catalogue import PrefillRule
from equipoise.balancer.requests.cluster import (
    PER_TOKEN,
    Cluster,
    Drafting,
    Prefill,
    PrefillAlignment,
    StepTime,
    published_step_time,
)
from equipoise.balancer.requests.policy_comparison import (
    ComparisonSetup,
    NamedPolicy,
    WorkloadFactory,
    named_policies,
)
from equipoise.balancer.requests.policy_settings import POLICIES, WhenFull
from equipoise.balancer.requests.simulation import SaturatedArrivals, Scenario, TimedArrivals
from equipoise.balancer.requests.traces import read_trace
from equipoise.balancer.requests.workload import Workload
from equipoise.balancer.requests.workload_generators import generate
from equipoise.cli.files import probe_file
from equipoise.cli.offline import check_outputs, usage_errors, warn
from equipoise.cli.option_checks import check_folder
from equipoise.cli.simulate import (
    DEFAULT_ACCEPTANCE,
    DEFAULT_FIXED_SHARE,
    LEAST_LOAD,
    MAX_LOAD,
    MAX_WORKERS,
    SATURATED,
    SimulateRequest,
)
from equipoise.hal.errors import UsageError
from equipoise.report.simulation.result import DRAWN_STEPS, MAX_KEPT_LOADS

FIT = "fit"
FIT_OPTIONS = ("window", "wait_bonus", "slack", "overshoot", "prefill_wait")
"""Options of that policy alone."""
ORACLE = "brh_oracle"
MAX_POINTS = 64


def known_policies() -> tuple[str, ...]:
    """In the order of tables: every policy, and the oracle after the policy that it belongs to."""
    names = []
    for name in POLICIES:
        names.append(name)
        if ORACLE.startswith(name):
            names.append(ORACLE)
    return tuple(names)


def select_policies(asked: tuple[str, ...]) -> tuple[str, ...]:
    """`all`, spelt out. Raises UsageError for an unknown name and for one that is there twice."""
    policies = known_policies()
    names = policies if asked == ("all",) else asked
    for name in names:
        if name not in policies:
            raise UsageError(
                f"--policies: unknown name {name!r}; known: all, {', '.join(policies)}"
            )
        if names.count(name) > 1:
            raise UsageError(f"--policies: {name} is there twice")
    return names


def validate(request: SimulateRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    if (request.trace is None) == (request.workload is None):
        how_many = "neither is" if request.trace is None else "both are"
        raise UsageError(f"--trace or --workload, one of them: {how_many} given")
    select_policies(request.policies)
    _check_slots(request)
    _check_step(request)
    _check_company(request)
    _check_cache(request)
    _check_load(request)
    _check_points(request)
    _check_files(request)


def _worker_slots(request: SimulateRequest) -> tuple[int, ...]:
    slots = request.slots_per_worker
    return (slots,) * request.workers if isinstance(slots, int) else slots


def _check_slots(request: SimulateRequest) -> None:
    if len(_worker_slots(request)) != request.workers:
        raise UsageError(
            f"--slots-per-worker has {len(_worker_slots(request))} numbers, "
            f"and there are {request.workers} --workers"
        )
    if request.sweep == "workers" and not isinstance(request.slots_per_worker, int):
        raise UsageError("--sweep workers needs one number of --slots-per-worker, for all")


def _check_step(request: SimulateRequest) -> None:
    if request.fixed_share is not None:
        if request.step_model != "share":
            raise UsageError(f"--fixed-share has no effect with --step-model {request.step_model}")
        if request.fixed_share == 1:
            raise UsageError("--fixed-share must be below 1, got 1")
    if request.seconds_per_token is not None and request.step_model == "bfio":
        raise UsageError("--seconds-per-token has no effect with --step-model bfio: it has its own")


def _check_company(request: SimulateRequest) -> None:
    """Options that say nothing without others."""
    if FIT not in select_policies(request.policies):
        for key in FIT_OPTIONS:
            if getattr(request, key) is not None:
                option = "--" + key.replace("_", "-")
                raise UsageError(
                    f"{option} has no effect without fit among --policies: it is fit's"
                )


def _check_cache(request: SimulateRequest) -> None:
    if request.cached_blocks and request.trace is None:
        raise UsageError(
            "--cached-blocks needs a trace with hashes of prompts: workloads have none"
        )
    if request.cached_blocks and request.sampling == "bootstrap":
        raise UsageError("--sampling bootstrap: a prompt drawn twice would be in the cache already")


def _check_load(request: SimulateRequest) -> None:
    if request.arrivals == "trace" and request.trace is None:
        raise UsageError("--arrivals trace needs --trace: a workload has no times")
    if request.arrivals is None or request.sweep == "load":
        return
    if request.load == SATURATED:
        raise UsageError("--arrivals has no effect with --load saturated: requests always wait")
    if request.arrivals == "poisson" and request.load is None:
        raise UsageError("--arrivals poisson needs --load: how often requests come")


def _check_points(request: SimulateRequest) -> None:
    if request.points is None:
        return
    if len(request.points) > MAX_POINTS:
        raise UsageError(
            f"--points must be at most {MAX_POINTS} numbers, got {len(request.points)}"
        )
    if len(set(request.points)) < len(request.points):
        raise UsageError("--points: one is there twice")
    for point in request.points:
        whole = request.sweep != "workers" or (point == int(point) and point <= MAX_WORKERS)
        least, most = (LEAST_LOAD, MAX_LOAD) if request.sweep == "load" else (1, MAX_WORKERS)
        if not least <= point <= most or not whole:
            raise UsageError(f"--points: {point:g} is not what --sweep {request.sweep} goes over")


def _check_files(request: SimulateRequest) -> None:
    inputs = {} if request.trace is None else {"--trace": request.trace}
    out = request.out
    # Named as it was typed: with --out alone there is no --json to name.
    figures = "--json" if request.json else f"--out's {request.figures_file.name}"
    report = "--html" if request.html else f"--out's {request.report_file.name}"
    outputs = {figures: request.figures_file, report: request.report_file}
    if not (request.json and request.html):
        check_folder("--out", out)
    check_outputs(inputs, dict(outputs))
    for flag, path in outputs.items():
        probe_file(flag, path)


REQUESTS_PER_SLOT = 40
SAMPLING_TEXTS = {
    "bootstrap": "each seed draws as many requests of the trace with replacement (bootstrap)",
    "shuffled": "each seed shuffles the order of the trace",
    "recorded": "each seed has the trace in its order; {}",
    "drawn": "each seed draws requests of its own",
}


@dataclass(frozen=True)
class TrialSetup:
    """What is compared on what.

    Attributes:
        trial: workloads, seeds, cluster.
        contenders: the contenders.
        sampling: what seeds differ in, in words.
        arrivals: how requests come, in words.
    """

    trial: ComparisonSetup
    contenders: tuple[NamedPolicy, ...]
    sampling: str
    arrivals: str


def load_trace(request: SimulateRequest) -> Workload | None:
    """The trace, cut as asked for. Raises UsageError where it cannot be read, or has no hashes."""
    if request.trace is None:
        return None
    with usage_errors("--trace"):
        # Rows of a trace may be dropped, or hold several requests each.
        workload = read_trace(request.trace, request.format, request.requests)
    if request.requests is not None and workload.count < request.requests:
        warn(f"--requests {request.requests}: {request.trace} gave {workload.count}")
    elif request.requests is not None:
        workload = workload.first(request.requests)
    if request.cached_blocks and workload.hashes is None:
        raise UsageError(f"--cached-blocks: {request.trace} has no hashes of prompts")
    return _limit(request, workload)


def set_up_trial(request: SimulateRequest, trace: Workload | None) -> TrialSetup:
    """Raises UsageError for a cluster or times that cannot be."""
    sampling = _sampling(request)
    share = DEFAULT_FIXED_SHARE if request.fixed_share is None else request.fixed_share
    trial = ComparisonSetup(
        workload_factory=_generator(request) if trace is None else _of_trace(trace, sampling),
        seeds=range(request.seed, request.seed + request.seeds),
        scenario=_scenario(request),
        fixed_share=share if request.step_model == "share" else None,
        load=request.offered,
        keep_arrival_gaps=request.arrivals == "trace",
    )
    times = "times of arrival are drawn" if _poisson(request) else "they differ in what is drawn"
    words = SAMPLING_TEXTS[sampling].format(times)
    return TrialSetup(trial, _contenders(request), words, _arrivals(request))


def _limit(request: SimulateRequest, workload: Workload) -> Workload:
    limit = request.prompt_limit
    return workload if limit is None else workload.with_prompt_limit(limit)


def _generator(request: SimulateRequest) -> WorkloadFactory:
    assert request.workload is not None
    name = request.workload
    count = request.requests or REQUESTS_PER_SLOT * sum(_worker_slots(request))
    return lambda seed: _limit(request, generate(name, count, seed))


def _of_trace(trace: Workload, sampling: str) -> WorkloadFactory:
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
    late = request.report_interval
    return Scenario(
        cluster=_cluster(request),
        arrivals=TimedArrivals() if _own_times(request) else SaturatedArrivals(),
        front_ends=request.front_ends,
        report_interval=None if late is None else late / 1e3,
        token_delay=request.token_delay / 1e3,
        queue_timeout=request.queue_timeout,
        trajectory=max(DRAWN_STEPS, MAX_KEPT_LOADS // request.workers),
    )


def _cluster(request: SimulateRequest) -> Cluster:
    chunk, drafts = request.prefill_chunk, request.draft_tokens
    acceptance = DEFAULT_ACCEPTANCE if request.acceptance is None else request.acceptance
    return Cluster(
        workers=request.workers,
        slots=request.slots_per_worker,
        kv_tokens=request.kv_tokens,
        step=_step(request),
        prefill=None
        if chunk is None
        else Prefill(
            chunk=chunk, cached_blocks=request.cached_blocks, alignment=_alignment(request)
        ),
        drafting=None if drafts is None else Drafting(tokens=drafts, acceptance=acceptance),
    )


def _alignment(request: SimulateRequest) -> PrefillAlignment | None:
    if request.prefill_alignment is None:
        return None
    name, limit = request.prefill_alignment
    return PrefillAlignment(PrefillRule(name), limit)


def _step(request: SimulateRequest) -> StepTime:
    rate = PER_TOKEN if request.seconds_per_token is None else request.seconds_per_token
    step = StepTime(per_token=rate)
    if request.step_model != "share":
        step = published_step_time(request.step_model, max(_worker_slots(request)), rate)
    return replace(step, prompt_weight=request.prompt_weight, noise=request.noise)


def _contenders(request: SimulateRequest) -> tuple[NamedPolicy, ...]:
    fit_settings = {
        "window": request.window,
        "wait_bonus": request.wait_bonus,
        "slack": request.slack,
        "overshoot": request.overshoot,
        "prefill_wait": request.prefill_wait,
    }
    settings: dict[str, Any] = {k: value for k, value in fit_settings.items() if value is not None}
    settings["when_full"] = WhenFull(request.when_full)
    settings["prompt_weight"] = request.prompt_weight
    return tuple(
        replace(contender, policy=replace(contender.policy, **settings))
        for contender in named_policies(select_policies(request.policies))
    )
