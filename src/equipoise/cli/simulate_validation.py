"""What a simulation cannot be asked for: found before anything is read, each in one line."""

from collections.abc import Iterator

from equipoise.balancer.requests.rules import RULES
from equipoise.cli.files import try_file
from equipoise.cli.offline import check_outputs
from equipoise.cli.simulate_kinds import SATURATED
from equipoise.cli.simulate_options import SimulateRequest
from equipoise.cli.validation import check_count, check_folder
from equipoise.hal.errors import UsageError

FIT = "fit"
OF_FIT = ("window", "ageing", "slack", "gather")
"""Options of that policy alone."""
ORACLE = "brh_oracle"
MOST_REQUESTS = 10_000_000
MOST_SEEDS = 1000
MOST_WORKERS, MOST_SLOTS = 4096, 65_536
MOST_TOKENS = 2**40
MOST_FRONT_ENDS = 1024
MOST_WINDOW = 65_536
MOST_DRAFTS = 255
MOST_LOAD = 100.0
MOST_POINTS = 64


def known_policies() -> tuple[str, ...]:
    """In the order of tables: every rule, and the one with an oracle behind its like."""
    names = []
    for name in RULES:
        names.append(name)
        if ORACLE.startswith(name):
            names.append(ORACLE)
    return tuple(names)


def chosen_policies(asked: tuple[str, ...]) -> tuple[str, ...]:
    """`all`, spelt out. Raises UsageError for an unknown name and for one that is there twice."""
    known = known_policies()
    names = known if asked == ("all",) else asked
    for name in names:
        if name not in known:
            raise UsageError(f"--policies: unknown name {name!r}; known: all, {', '.join(known)}")
        if names.count(name) > 1:
            raise UsageError(f"--policies: {name} is there twice")
    return names


def validate(request: SimulateRequest) -> None:
    """Raises UsageError for what can be said without reading a file."""
    if (request.trace is None) == (request.workload is None):
        given = "neither is" if request.trace is None else "both are"
        raise UsageError(f"--trace or --workload, one of them: {given} given")
    chosen_policies(request.policies)
    for flag, count, most in _counts(request):
        if count is not None:
            check_count(flag, count, most)
    for flag, value, largest in _amounts(request):
        # So written, nan is refused too.
        if value is not None and not 0 <= value <= largest:
            raise UsageError(f"{flag} must be 0 to {largest:g}, got {value:g}")
    _check_step(request)
    _check_company(request)
    _check_cache(request)
    _check_load(request)
    _check_points(request)
    _check_files(request)


def _counts(request: SimulateRequest) -> Iterator[tuple[str, int | None, int]]:
    yield "--requests", request.requests, MOST_REQUESTS
    yield "--prompt-limit", request.prompt_limit, MOST_TOKENS
    yield "--seeds", request.seeds, MOST_SEEDS
    yield "--workers", request.workers, MOST_WORKERS
    yield "--slots-per-worker", request.slots_per_worker, MOST_SLOTS
    yield "--kv-tokens", request.kv_tokens, MOST_TOKENS
    yield "--prefill-chunk", request.prefill_chunk, MOST_TOKENS
    yield "--drafts", request.drafts, MOST_DRAFTS
    yield "--front-ends", request.front_ends, MOST_FRONT_ENDS
    yield "--window", request.window, MOST_WINDOW


def _amounts(request: SimulateRequest) -> Iterator[tuple[str, float | None, float]]:
    yield "--seed", request.seed, 2**32
    yield "--cached-blocks", request.cached_blocks, MOST_TOKENS
    yield "--acceptance", request.acceptance, 1
    yield "--seconds-per-token", request.seconds_per_token, 1
    yield "--prompt-weight", request.prompt_weight, 1e9
    yield "--noise", request.noise, 10
    yield "--report-every", request.report_every, 1e9
    yield "--tell-every", request.tell_every, 1e9
    yield "--patience", request.patience, 1e9
    yield "--ageing", request.ageing, 1e12
    yield "--slack", request.slack, 1e6
    yield "--gather", request.gather, 1e6


def _check_step(request: SimulateRequest) -> None:
    if request.seconds_per_token == 0:
        raise UsageError("--seconds-per-token must be above 0: steps would all be alike")
    if request.fixed_share is not None:
        if request.step_model != "share":
            raise UsageError(f"--fixed-share says nothing with --step-model {request.step_model}")
        if not 0 <= request.fixed_share < 1:
            raise UsageError(
                f"--fixed-share must be at least 0 and below 1, got {request.fixed_share:g}"
            )
    if request.seconds_per_token is not None and request.step_model == "bfio":
        raise UsageError("--seconds-per-token says nothing with --step-model bfio: it has its own")


def _check_company(request: SimulateRequest) -> None:
    """Options that say nothing without others."""
    if request.patience == 0:
        raise UsageError("--patience must be above 0: nobody would be served")
    if request.acceptance is not None and request.drafts is None:
        raise UsageError("--acceptance needs --drafts: nothing is drafted")
    if request.prompt_weight and request.prefill_chunk is None:
        raise UsageError("--prompt-weight needs --prefill-chunk: prompts come computed")
    if request.trace is None and request.format is not None:
        raise UsageError("--format needs --trace: a workload has none")
    if request.trace is None and request.sampling is not None:
        raise UsageError("--sampling needs --trace: a workload is drawn anew by each seed")
    if FIT not in chosen_policies(request.policies):
        for key in OF_FIT:
            if getattr(request, key) is not None:
                raise UsageError(f"--{key} says nothing without fit among --policies: it is fit's")


def _check_cache(request: SimulateRequest) -> None:
    if request.cached_blocks and request.prefill_chunk is None:
        raise UsageError("--cached-blocks needs --prefill-chunk: prompts come computed")
    if request.cached_blocks and request.trace is None:
        raise UsageError(
            "--cached-blocks needs a trace with hashes of prompts: workloads have none"
        )
    if request.cached_blocks and request.sampling == "bootstrap":
        raise UsageError("--sampling bootstrap: a prompt drawn twice would be in the cache already")


def _check_load(request: SimulateRequest) -> None:
    if request.offered is not None and not 0 < request.offered <= MOST_LOAD:
        raise UsageError(f"--load must be above 0, at most {MOST_LOAD:g}, got {request.offered:g}")
    if request.arrivals == "trace" and request.trace is None:
        raise UsageError("--arrivals trace needs --trace: a workload has no times")
    if request.arrivals is None or request.sweep == "load":
        return
    if request.load == SATURATED:
        raise UsageError("--arrivals says nothing with --load saturated: requests always wait")
    if request.arrivals == "poisson" and request.load is None:
        raise UsageError("--arrivals poisson needs --load: how often requests come")


def _check_points(request: SimulateRequest) -> None:
    if request.points is None:
        return
    if request.sweep is None:
        raise UsageError("--points needs --sweep: what is swept")
    check_count("--points: how many", len(request.points), MOST_POINTS)
    if len(set(request.points)) < len(request.points):
        raise UsageError("--points: one is there twice")
    for point in request.points:
        whole = request.sweep != "workers" or (point == int(point) and point <= MOST_WORKERS)
        if not 0 < point <= (MOST_LOAD if request.sweep == "load" else MOST_WORKERS) or not whole:
            raise UsageError(f"--points: {point:g} is not what --sweep {request.sweep} goes over")


def _check_files(request: SimulateRequest) -> None:
    inputs = {} if request.trace is None else {"--trace": request.trace}
    out = request.out
    # Named as it was typed: who gave --out alone has given no --json.
    figures = "--json" if request.json else f"--out's {request.figures_file.name}"
    report = "--html" if request.html else f"--out's {request.report_file.name}"
    outputs = {figures: request.figures_file, report: request.report_file}
    if not (request.json and request.html):
        check_folder("--out", out)
    check_outputs(inputs, dict(outputs))
    for flag, path in outputs.items():
        try_file(flag, path)
