"""`equipoise simulate`: its options, and the run from workloads to table, figures and report."""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.balancer.requests.catalogue import FORMATS, STEP_MODELS, WORKLOADS
from equipoise.cli import kinds
from equipoise.cli import simulate_kinds as own
from equipoise.cli.files import write_file
from equipoise.cli.offline import print_written, request_values, warn
from equipoise.cli.option import Option
from equipoise.hal.errors import EquipoiseError, PolicyError, UsageError

SIMULATE = """\
Serve the same requests on the same data-parallel workers with several routers, and
say what each leaves idle at the barrier, how fast tokens come and how long requests
wait, with confidence intervals. A simulation by the native core, not a measurement."""
SIMULATE_EXAMPLES = """\
examples:
  equipoise simulate --workload prop
  equipoise simulate --trace mooncake_conversation_trace.jsonl --slots-per-worker 16
  equipoise simulate --trace conv.csv --load 0.8 --policies round_robin,br0,fit
  equipoise simulate --workload reason --sweep load --out swept
  equipoise simulate --config examples/configs/simulate-small.yaml

exit code: 0 simulated, 2 bad input, nothing was written, 3 something could not be
written"""

WORKLOAD, CLUSTER, STEP = "what is served", "what serves", "how long a step takes"
ROUTING, SWEEP, OUTPUT = "routing and arrivals", "sweeps", "output"

OPTIONS = (
    Option(key="trace", kind=kinds.PATH, group=WORKLOAD, metavar="FILE", shown_default="none",
           help="requests of a published trace, gzip or not; this, or --workload"),
    Option(key="format", kind=own.FORMAT, group=WORKLOAD, metavar="|".join(FORMATS),
           shown_default="from how the file begins", help="of --trace"),
    Option(key="workload", kind=kinds.WORKLOAD, group=WORKLOAD, metavar="|".join(WORKLOADS),
           shown_default="none", help="requests that are drawn: "
           + "; ".join(f"{name}: {about}" for name, about in WORKLOADS.items())),
    Option(key="requests", kind=kinds.WHOLE, group=WORKLOAD, metavar="N",
           shown_default="all of a trace, 40 a slot of a workload",
           help="how many of them, from the trace's first row on"),
    Option(key="prompt_limit", kind=kinds.WHOLE, group=WORKLOAD, metavar="TOKENS",
           shown_default="none", help="leave out requests with a longer prompt"),
    Option(key="sampling", kind=own.SAMPLING, group=WORKLOAD, metavar="|".join(own.SAMPLINGS),
           shown_default="bootstrap; with --cached-blocks shuffled, or recorded with times that "
           "are drawn", help="what seeds of a trace differ in: requests drawn with replacement, "
           "the order, or neither"),
    Option(key="seeds", kind=kinds.WHOLE, group=WORKLOAD, metavar="N", shown_default="5",
           help="runs of each policy; with one there are no intervals"),
    Option(key="seed", kind=kinds.WHOLE, group=WORKLOAD, metavar="N", shown_default="0",
           help="the first of them; the others follow"),
    Option(key="workers", kind=kinds.WHOLE, group=CLUSTER, metavar="N", shown_default="8",
           help="data-parallel workers, in lockstep"),
    Option(key="slots_per_worker", kind=own.SLOTS, group=CLUSTER, metavar="N[,N...]",
           shown_default="32", help="requests that each serves at once, or a number for "
           "each worker"),
    Option(key="kv_tokens", kind=kinds.WHOLE, group=CLUSTER, metavar="TOKENS",
           shown_default="no bound", help="what the KV cache of each holds; a request that never "
           "fits fails"),
    Option(key="prefill_chunk", kind=kinds.WHOLE, group=CLUSTER, metavar="TOKENS",
           shown_default="none: prompts come computed",
           help="prompt tokens that each computes in a step, besides decoding"),
    Option(key="prefill_alignment", kind=own.ALIGNMENT, group=CLUSTER, metavar="ENGINE[:STEPS]",
           shown_default="none", help="what the engine does to compute prompts of several workers "
           "in the same steps: sglang (prefill delayer, 30 steps at most), vllm (schedule "
           "interval, 8 steps) or trtllm (attention DP balance, 50 at most); needs "
           "--prefill-chunk"),
    Option(key="cached_blocks", kind=kinds.WHOLE, group=CLUSTER, metavar="N", shown_default="0",
           help="blocks of prompts that each keeps for later ones; needs --prefill-chunk and a "
           "trace with hashes"),
    Option(key="draft_tokens", kind=kinds.WHOLE, group=CLUSTER, metavar="N", shown_default="none",
           help="tokens drafted a step, for speculative decoding"),
    Option(key="acceptance", kind=kinds.REAL, group=CLUSTER, metavar="X", shown_default="0.7",
           help="chance that a draft is accepted if those before it were; needs --draft-tokens"),
    Option(key="step_model", kind=own.STEP_MODEL, group=STEP, metavar="|".join(STEP_MODELS),
           shown_default="share", help="; ".join(f"{k}: {v}" for k, v in STEP_MODELS.items())),
    Option(key="fixed_share", kind=kinds.REAL, group=STEP, metavar="X", shown_default="0.5",
           help="part of a step at full load that does not depend on it, with share"),
    Option(key="seconds_per_token", kind=kinds.REAL, group=STEP, metavar="S",
           shown_default="1e-7", help="that reading one token of the KV cache takes; bfio has its "
           "own"),
    Option(key="prompt_weight", kind=kinds.REAL, group=STEP, metavar="X", shown_default="0",
           help="what computing a prompt token takes, in tokens read; fit counts with it too; "
           "needs --prefill-chunk"),
    Option(key="noise", kind=kinds.REAL, group=STEP, metavar="SIGMA", shown_default="0",
           help="of a lognormal factor on each worker's work in each step"),
    Option(key="policies", kind=own.POLICY_NAMES, group=ROUTING, metavar="all|NAME,NAME,...",
           shown_default="all", help="routers to compare; page Simulation says what each does"),
    Option(key="load", kind=own.LOAD, group=ROUTING, metavar="saturated|X",
           shown_default="saturated, or with --arrivals trace the trace's own",
           help="requests always wait, or they come at this part of the capacity"),
    Option(key="arrivals", kind=own.ARRIVAL, group=ROUTING, metavar="|".join(own.ARRIVALS),
           shown_default="poisson", help="how they come at a load: at random, or at the trace's "
           "times, stretched"),
    Option(key="when_full", kind=own.FULL, group=ROUTING, metavar="|".join(own.WHEN_FULL),
           shown_default="queue", help="what policies that push do while every worker is full: as "
           "published, queue at a worker, or hold the request back"),
    Option(key="front_ends", kind=kinds.WHOLE, group=ROUTING, metavar="N", shown_default="1",
           help="processes that route; each sees its own requests only"),
    Option(key="report_interval", kind=kinds.REAL, group=ROUTING, metavar="MS",
           shown_default="as each policy was published",
           help="how old reports of workers get; 0: never old"),
    Option(key="token_delay", kind=kinds.REAL, group=ROUTING, metavar="MS", shown_default="0",
           help="how late front ends learn of tokens and ends; 0: after every step"),
    Option(key="queue_timeout", kind=kinds.REAL, group=ROUTING, metavar="SECONDS",
           shown_default="no end", help="after which a request that waits is given up"),
    Option(key="window", kind=kinds.WHOLE, group=ROUTING, metavar="N",
           shown_default="the policy's", help="fit: waiting requests that it chooses from"),
    Option(key="wait_bonus", kind=kinds.REAL, group=ROUTING, metavar="X",
           shown_default="the policy's", help="fit: what having waited for a step is worth, in "
           "mean sizes of the requests that wait; more is fairer"),
    Option(key="slack", kind=kinds.REAL, group=ROUTING, metavar="X",
           shown_default="the policy's",
           help="fit: how far above the mean load a worker still takes requests, in standard "
           "deviations of the loads"),
    Option(key="overshoot", kind=kinds.REAL, group=ROUTING, metavar="X",
           shown_default="the policy's", help="fit: what a token above the level costs, in tokens "
           "below it and times the workers"),
    Option(key="prefill_wait", kind=kinds.REAL, group=ROUTING, metavar="X",
           shown_default="the policy's",
           help="fit, with --prompt-weight: requests wait for each other, so that prompts are "
           "computed together, until X times what one costs alone is lost; 0: never"),
    Option(key="sweep", kind=own.SWEEP, group=SWEEP, metavar="|".join(own.SWEEPS),
           shown_default="none", help="the same again at several loads, or on several numbers of "
           "workers"),
    Option(key="points", kind=own.POINTS, group=SWEEP, metavar="X,X,...",
           shown_default="loads 0.5,0.6,...,1.2; workers 4,8,16,32", help="of the sweep"),
    Option(key="out", kind=kinds.PATH, group=OUTPUT, metavar="DIR",
           shown_default="equipoise-simulate", help="folder of summary.json and report.html"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE",
           shown_default="DIR/summary.json", help="write the figures there instead"),
    Option(key="html", kind=kinds.PATH, group=OUTPUT, metavar="FILE",
           shown_default="DIR/report.html", help="write the report there instead"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no progress, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class SimulateRequest:
    """What one `equipoise simulate` was asked for; `progress` is `shown` or `hidden`.

    report_interval and token_delay are in milliseconds; None: not set.
    """

    trace: Path | None = None
    format: str | None = None
    workload: str | None = None
    requests: int | None = None
    prompt_limit: int | None = None
    sampling: str | None = None
    seeds: int = 5
    seed: int = 0
    workers: int = 8
    slots_per_worker: int | tuple[int, ...] = 32
    kv_tokens: int | None = None
    prefill_chunk: int | None = None
    prefill_alignment: tuple[str, int] | None = None
    cached_blocks: int = 0
    draft_tokens: int | None = None
    acceptance: float | None = None
    step_model: str = "share"
    fixed_share: float | None = None
    seconds_per_token: float | None = None
    prompt_weight: float = 0.0
    noise: float = 0.0
    policies: tuple[str, ...] = ("all",)
    load: str | float | None = None
    arrivals: str | None = None
    when_full: str = "queue"
    front_ends: int = 1
    report_interval: float | None = None
    token_delay: float = 0.0
    queue_timeout: float | None = None
    window: int | None = None
    wait_bonus: float | None = None
    slack: float | None = None
    overshoot: float | None = None
    prefill_wait: float | None = None
    sweep: str | None = None
    points: tuple[float, ...] | None = None
    out: Path = Path("equipoise-simulate")
    json: Path | None = None
    html: Path | None = None
    progress: str = "shown"

    @property
    def figures_file(self) -> Path:
        """Where the figures go."""
        return self.json or self.out / "summary.json"

    @property
    def report_file(self) -> Path:
        """Where the report goes."""
        return self.html or self.out / "report.html"

    @property
    def offered(self) -> float | None:
        """The part of the capacity at which requests come; None: saturated, or as recorded."""
        return None if isinstance(self.load, str) else self.load


if TYPE_CHECKING:
    from equipoise.balancer.requests.policy_comparison import (
        NamedPolicy,
        PolicyResult,
        ResultCallback,
    )
    from equipoise.balancer.requests.simulation_run import SimulationRun
    from equipoise.balancer.requests.workload import Workload
    from equipoise.cli.progress import SimulationProgress
    from equipoise.cli.simulate_setup import TrialSetup
    from equipoise.report.simulation.result import SimulationResult, Sweep

SWEEP_LOADS = 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2
SWEEP_WORKERS = 4.0, 8.0, 16.0, 32.0


def simulate(arguments: Namespace, command: str) -> int:
    """Run every policy on every seed, write figures and report, print the table; returns 0.

    Raises UsageError before anything is written, EquipoiseError where no request was served.
    """
    from equipoise.cli.simulate_setup import validate
    from equipoise.report.simulation.table import render
    from equipoise.report.terminal import stdout_colour_mode

    request = request_of(vars(arguments))
    validate(request)
    with _refused():
        simulation = run_simulation(request)
    try:
        # Before the table: a closed standard output must not cost the files.
        _write(request, simulation, command)
    finally:
        print(render(simulation, stdout_colour_mode()), flush=True)
    _check_served(request, simulation)
    return 0


def _check_served(request: SimulateRequest, simulation: "SimulationResult") -> None:
    """Raises EquipoiseError where every request failed: a table of dashes says nothing."""
    points = () if simulation.sweep is None else simulation.sweep.points
    results = [*simulation.results, *(result for point in points for result in point.results)]
    if any(result.interval("failed").mean < 1 for result in results):
        return
    bounds = {"--kv-tokens": request.kv_tokens, "--queue-timeout": request.queue_timeout}
    why = " and ".join(f"{flag} {value:g}" for flag, value in bounds.items() if value is not None)
    why = why or "these settings"
    raise EquipoiseError(f"every request failed, with every policy: {why} let none be served")


def request_of(arguments: Mapping[str, Any]) -> SimulateRequest:
    """What the command line asks for, its configuration file included."""
    return SimulateRequest(**request_values(arguments, BY_KEY))


def run_simulation(request: SimulateRequest) -> "SimulationResult":
    """Run everything. Raises UsageError, and PolicyError for settings that no policy takes."""
    from equipoise.cli.progress import simulation_progress_for
    from equipoise.cli.simulate_setup import load_trace, set_up_trial
    from equipoise.report.simulation.result import (
        PlotDataCollector,
        SimulationResult,
        SimulationSubject,
    )

    trace, watch = load_trace(request), PlotDataCollector()
    staged = set_up_trial(request, trace)
    subject = SimulationSubject.of(staged.trial, staged.sampling, staged.arrivals)
    _warn_of_seeds(request, staged)
    points = sweep_points(request)
    runs = len(staged.contenders) * request.seeds * (1 + len(points))
    progress = simulation_progress_for(request.progress, runs)
    try:
        results = _compare(staged, progress, watch.keep)
        sweep = _sweep(request, points, trace, progress)
    finally:
        progress.close()
    seeds = tuple(staged.trial.seeds)
    return SimulationResult(
        subject=subject, seeds=seeds, results=results, plot_data=watch.plot_data(), sweep=sweep
    )


def sweep_points(request: SimulateRequest) -> tuple[float, ...]:
    """Of the sweep; none without one."""
    if request.sweep is None:
        return ()
    return request.points or (SWEEP_LOADS if request.sweep == "load" else SWEEP_WORKERS)


def _sweep(
    request: SimulateRequest,
    points: tuple[float, ...],
    trace: "Workload | None",
    progress: "SimulationProgress",
) -> "Sweep | None":
    from equipoise.cli.simulate_setup import set_up_trial
    from equipoise.report.simulation.result import Sweep, SweepPoint

    if request.sweep is None:
        return None
    sweep_points = []
    for value in points:
        there = (
            replace(request, load=value)
            if request.sweep == "load"
            else replace(request, workers=int(value))
        )
        sweep_points.append(SweepPoint(value, _compare(set_up_trial(there, trace), progress)))
    return Sweep(request.sweep, tuple(sweep_points))


def _compare(
    staged: "TrialSetup", progress: "SimulationProgress", on_result: "ResultCallback | None" = None
) -> "tuple[PolicyResult, ...]":
    from equipoise.balancer.requests.policy_comparison import compare_policies

    count = staged.trial.workload_factory(staged.trial.seeds[0]).count

    def on_progress(label: str, seed: int, done: int) -> None:
        progress.update(label, seed, done / count)

    def ended(contender: "NamedPolicy", seed: int, outcome: "SimulationRun") -> None:
        if on_result is not None:
            on_result(contender, seed, outcome)
        progress.finish_run()

    return compare_policies(staged.trial, staged.contenders, on_progress, ended)


@contextmanager
def _refused() -> Iterator[None]:
    """Settings that no policy takes are the user's to mend."""
    try:
        yield
    except PolicyError as error:
        raise UsageError(str(error)) from error


def _warn_of_seeds(request: SimulateRequest, staged: "TrialSetup") -> None:
    draws_arrivals = staged.trial.load is not None and not staged.trial.keep_arrival_gaps
    if request.sampling == "recorded" and request.seeds > 1 and not draws_arrivals:
        warn("--sampling recorded: seeds differ in nothing but what policies and noise draw")


def _write(request: SimulateRequest, simulation: "SimulationResult", command: str) -> None:
    from equipoise.report.simulation.json_output import json_value, to_json

    about = {"command": command, "settings": json_value(asdict(request))}
    figures = about | to_json(simulation)
    text = json.dumps(figures, indent=2, allow_nan=False)
    place = write_file(request.figures_file, text + "\n", request.out)
    lines = [f"figures: {place}"]
    from equipoise.report.simulation.html import render_html
    from equipoise.report.svg import PlotsMissing

    try:
        place = write_file(
            request.report_file, render_html(simulation, about, figures), request.out
        )
        lines.append(f"report: {place}")
    except PlotsMissing as missing:
        warn(f"no report: {missing}")
    print_written(request.progress, lines)
