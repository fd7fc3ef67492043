"""`equipoise simulate`: its options, and the run from workloads to table, figures and report."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from equipoise.balancer.requests.catalogue import (
    DEFAULT_LIMITS,
    FORMATS,
    STEP_MODELS,
    WORKLOADS,
    PrefillRule,
)
from equipoise.cli import kinds
from equipoise.cli.command import Command, Settings
from equipoise.cli.offline import print_written, warn, write_figures, write_page
from equipoise.hal.errors import EquipoiseError, PolicyError, UsageError
from equipoise.option import NAME, OUTPUT, REAL, Kind, Option, choice, int_of_yaml, str_of_yaml

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
ROUTING, SWEEP = "routing and arrivals", "sweeps"
SATURATED = "saturated"
MAX_REQUESTS = 10_000_000
MAX_SEEDS = 1000
MAX_WORKERS, MAX_SLOTS = 4096, 65_536
MAX_TOKENS = 2**40
MAX_FRONT_ENDS = 1024
MAX_WINDOW = 65_536
MAX_DRAFTS = 255
DEFAULT_FIXED_SHARE, DEFAULT_ACCEPTANCE = 0.5, 0.7
"""Of options whose fields are None where they were not given: without their step model or drafts
they would have no effect, and are refused."""
LEAST_LOAD, MAX_LOAD = 1e-6, 100.0
"""Below the least, times between requests overflow before they mean anything."""


def _load_of_text(text: str) -> object:
    return text if text == SATURATED else REAL.from_text(text)


def _load_of_yaml(value: object) -> object:
    return value if value == SATURATED else REAL.from_yaml(value)


def _slots_of_text(text: str) -> int | tuple[int, ...]:
    numbers = tuple(int(word) for word in text.split(","))
    first, *others = numbers
    return numbers if others else first


def _slots_of_yaml(value: object) -> int | tuple[int, ...]:
    if isinstance(value, list) and value:
        return tuple(int_of_yaml(item) for item in value)
    return _slots_of_text(value) if isinstance(value, str) else int_of_yaml(value)


def _alignment_of_text(text: str) -> tuple[str, int]:
    name, colon, limit = text.partition(":")
    rule = PrefillRule(name)
    return name, int(limit) if colon else DEFAULT_LIMITS[rule]


LOAD = Kind("saturated or a number", _load_of_text, _load_of_yaml, metavar="saturated|X")
POLICY_NAMES = kinds.separated(NAME, "names with commas between", "all|NAME,NAME,...")
SLOTS = Kind(
    "a whole number, or one a worker with commas between", _slots_of_text, _slots_of_yaml,
    metavar="N[,N...]",
)  # fmt: skip
ALIGNMENT = Kind(
    f"{', '.join(rule.value for rule in PrefillRule)}, and a limit in steps behind a colon",
    _alignment_of_text,
    lambda value: _alignment_of_text(str_of_yaml(value)),
    metavar="ENGINE[:STEPS]",
)


@dataclass(frozen=True, kw_only=True)
class SimulateRequest(Settings):
    """What one `equipoise simulate` was asked for.

    report_interval and token_delay are in milliseconds; None: not set.
    """

    # fmt: off
    trace: Annotated[Path | None, Option(
        "requests of a published trace, gzip or not; this, or --workload", WORKLOAD)] = None
    format: Annotated[str | None, Option(
        "of the file", WORKLOAD, kind=choice(tuple(FORMATS)), default="from how the file begins",
        needs=("trace", "a workload has none"))] = None
    workload: Annotated[str | None, Option(
        "requests that are drawn: "
        + "; ".join(f"{name}: {about}" for name, about in WORKLOADS.items()), WORKLOAD,
        kind=choice(tuple(WORKLOADS)))] = None
    requests: Annotated[int | None, Option(
        "how many of them, from the trace's first row on", WORKLOAD, least=1, most=MAX_REQUESTS,
        default="all of a trace, 40 a slot of a workload")] = None
    prompt_limit: Annotated[int | None, Option(
        "leave out requests with a longer prompt", WORKLOAD,
        least=1, most=MAX_TOKENS, metavar="TOKENS")] = None
    sampling: Annotated[Literal["bootstrap", "shuffled", "recorded"] | None, Option(
        "what seeds of a trace differ in: requests drawn with replacement, the order, or neither",
        WORKLOAD, needs=("trace", "a workload is drawn anew by each seed"),
        default="bootstrap; with --cached-blocks shuffled, or recorded with times that "
        "are drawn")] = None
    seeds: Annotated[int, Option(
        "runs of each policy; with one there are no intervals", WORKLOAD, least=1, most=MAX_SEEDS
    )] = 5
    seed: Annotated[int, Option(
        "the first of them; the others follow", WORKLOAD, least=0, most=2**32)] = 0
    workers: Annotated[int, Option(
        "data-parallel workers, in lockstep", CLUSTER, least=1, most=MAX_WORKERS)] = 8
    slots_per_worker: Annotated[int | tuple[int, ...], Option(
        "requests that each serves at once, or a number for each worker", CLUSTER, kind=SLOTS,
        least=1, most=MAX_SLOTS)] = 32
    kv_tokens: Annotated[int | None, Option(
        "what the KV cache of each holds; a request that never fits fails", CLUSTER,
        least=1, most=MAX_TOKENS, metavar="TOKENS", default="no bound")] = None
    prefill_chunk: Annotated[int | None, Option(
        "prompt tokens that each computes in a step, besides decoding", CLUSTER,
        least=1, most=MAX_TOKENS, metavar="TOKENS", default="none: prompts come computed")] = None
    prefill_alignment: Annotated[tuple[str, int] | None, Option(
        "what the engine does to compute prompts of several workers in the same steps: sglang "
        "(prefill delayer, 30 steps at most), vllm (schedule interval, 8 steps) or trtllm "
        "(attention DP balance, 50 at most)", CLUSTER, kind=ALIGNMENT,
        needs=("prefill_chunk", "prompts come computed"),
        rare=True)] = None
    cached_blocks: Annotated[int, Option(
        "blocks of prompts that each keeps for later ones, by the hashes of a trace", CLUSTER,
        needs=("prefill_chunk", "prompts come computed"), least=0, most=MAX_TOKENS)] = 0
    draft_tokens: Annotated[int | None, Option(
        "tokens drafted a step, for speculative decoding", CLUSTER, least=1, most=MAX_DRAFTS,
        rare=True)] = None
    acceptance: Annotated[float | None, Option(
        "chance that a draft is accepted if those before it were", CLUSTER,
        needs=("draft_tokens", "nothing is drafted"),
        least=0, most=1, default=f"{DEFAULT_ACCEPTANCE:g}", rare=True)] = None
    step_model: Annotated[str, Option(
        "; ".join(f"{name}: {about}" for name, about in STEP_MODELS.items()), STEP,
        kind=choice(tuple(STEP_MODELS)))] = "share"
    fixed_share: Annotated[float | None, Option(
        "part of a step at full load that does not depend on it, with share; below 1", STEP,
        least=0, most=1, default=f"{DEFAULT_FIXED_SHARE:g}")] = None
    seconds_per_token: Annotated[float | None, Option(
        "that reading one token of the KV cache takes; bfio has its own", STEP,
        least=0, above=True, most=1, metavar="S", default="1e-7")] = None
    prompt_weight: Annotated[float, Option(
        "what computing a prompt token takes, in tokens read; fit counts with it too", STEP,
        needs=("prefill_chunk", "prompts come computed"), least=0, most=1e9)] = 0.0
    noise: Annotated[float, Option(
        "of a lognormal factor on each worker's work in each step", STEP,
        least=0, most=10, metavar="SIGMA")] = 0.0
    policies: Annotated[tuple[str, ...], Option(
        "routers to compare; page Simulation says what each does", ROUTING, kind=POLICY_NAMES,
        default="all")] = ("all",)
    load: Annotated[str | float | None, Option(
        "requests always wait, or they come at this part of the capacity", ROUTING, kind=LOAD,
        least=LEAST_LOAD, most=MAX_LOAD,
        default="saturated, or with --arrivals trace the trace's own")] = None
    arrivals: Annotated[Literal["poisson", "trace"] | None, Option(
        "how they come at a load: at random, or at the trace's times, stretched", ROUTING,
        default="poisson")] = None
    when_full: Annotated[Literal["queue", "hold"], Option(
        "what policies that push do while every worker is full: as published, queue at a worker, "
        "or hold the request back", ROUTING)] = "queue"
    front_ends: Annotated[int, Option(
        "processes that route; each sees its own requests only", ROUTING,
        least=1, most=MAX_FRONT_ENDS)] = 1
    report_interval: Annotated[float | None, Option(
        "how old reports of workers get; 0: never old", ROUTING,
        least=0, most=1e9, metavar="MS", default="as each policy was published", rare=True)] = None
    token_delay: Annotated[float, Option(
        "how late front ends learn of tokens and ends; 0: after every step", ROUTING,
        least=0, most=1e9, metavar="MS", rare=True)] = 0.0
    queue_timeout: Annotated[float | None, Option(
        "after which a request that waits is given up", ROUTING,
        least=0, above=True, most=1e9, metavar="SECONDS", default="no end")] = None
    window: Annotated[int | None, Option(
        "fit: waiting requests that it chooses from", ROUTING,
        least=1, most=MAX_WINDOW, default="the policy's", rare=True)] = None
    wait_bonus: Annotated[float | None, Option(
        "fit: what having waited for a step is worth, in mean sizes of the requests that wait; "
        "more is fairer", ROUTING, least=0, most=1e12, default="the policy's", rare=True)] = None
    slack: Annotated[float | None, Option(
        "fit: how far above the mean load a worker still takes requests, in standard deviations "
        "of the loads", ROUTING, least=0, most=1e6, default="the policy's", rare=True)] = None
    overshoot: Annotated[float | None, Option(
        "fit: what a token above the level costs, in tokens below it and times the workers",
        ROUTING, least=0, most=1e6, default="the policy's", rare=True)] = None
    prefill_wait: Annotated[float | None, Option(
        "fit: requests wait for each other, so that prompts are computed "
        "together, until X times what one costs alone is lost; 0: never", ROUTING,
        needs=("prompt_weight", "prompts are free without it"),
        least=0, most=1e6, default="the policy's", rare=True)] = None
    sweep: Annotated[Literal["load", "workers"] | None, Option(
        "the same again at several loads, or on several numbers of workers", SWEEP)] = None
    points: Annotated[tuple[float, ...] | None, Option(
        "of the sweep", SWEEP, kind=kinds.REALS, needs=("sweep", "what is swept"),
        default="loads 0.5,0.6,...,1.2; workers 4,8,16,32")] = None
    out: Annotated[Path, Option(
        "folder of summary.json and report.html", OUTPUT, metavar="DIR"
    )] = Path("equipoise-simulate")
    json: Annotated[Path | None, Option(
        "write the figures there instead", OUTPUT, default="DIR/summary.json")] = None
    html: Annotated[Path | None, Option(
        "write the report there instead", OUTPUT, default="DIR/report.html")] = None
    # fmt: on

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


def simulate(request: SimulateRequest, command: str) -> int:
    """Run every policy on every seed, write figures and report, print the table; returns 0.

    Raises UsageError before anything is written, EquipoiseError where no request was served.
    """
    from equipoise.cli.simulate_setup import validate
    from equipoise.report.simulation.table import render
    from equipoise.report.terminal import stdout_colour_mode

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
    from equipoise.report.simulation.html import render_html

    lines = write_figures(request.figures_file, figures, request.out)
    lines += write_page(
        request.report_file, lambda: render_html(simulation, about, figures), "report", request.out
    )
    print_written(request.progress, lines)


COMMAND = Command(SimulateRequest, simulate, description=SIMULATE, examples=SIMULATE_EXAMPLES)
