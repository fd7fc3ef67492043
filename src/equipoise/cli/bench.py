"""`equipoise bench serve`: its options, its checks, and the run from a load plan to figures."""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.balancer.requests.catalogue import FORMATS, WORKLOADS
from equipoise.cli import kinds
from equipoise.cli.files import write_file
from equipoise.cli.offline import check_outputs, print_written, request_values
from equipoise.cli.option import REQUIRED, Option
from equipoise.cli.option_checks import check_count
from equipoise.cli.route import read_api_keys
from equipoise.cli.route_workers import parse_url
from equipoise.hal.errors import UsageError

WHERE, WHAT, WHEN, OUTPUT = "server", "requests", "arrivals", "output"
ENDPOINTS = kinds.ENDPOINTS

OPTIONS = (
    Option(key="url", kind=kinds.NAME, group=WHERE, metavar="URL",
           shown_default=REQUIRED, help="of the server, or of the proxy"),
    Option(key="model", kind=kinds.NAME, group=WHERE, metavar="NAME",
           shown_default="the first that the server has", help="model to ask for"),
    Option(key="endpoint", kind=kinds.ENDPOINT, group=WHERE, metavar="|".join(ENDPOINTS),
           shown_default=ENDPOINTS[0], help="which of the API's two ways to ask"),
    Option(key="api_key_file", kind=kinds.PATH, group=WHERE, metavar="FILE", shown_default="none",
           help="key to send"),
    Option(key="timeout", kind=kinds.SECONDS, group=WHERE, metavar="SECONDS", shown_default="600",
           help="longest that a request may take"),
    Option(key="requests", kind=kinds.WHOLE, group=WHAT, metavar="N", shown_default="200",
           help="how many to send; at most as many as --trace has"),
    Option(key="workload", kind=kinds.WORKLOAD, group=WHAT, metavar="|".join(WORKLOADS),
           shown_default="sharegpt", help="lengths of prompts and outputs: "
           + "; ".join(f"{name}: {about}" for name, about in WORKLOADS.items())),
    Option(key="trace", kind=kinds.PATH, group=WHAT, metavar="FILE", shown_default="none",
           help=f"take lengths, and times where it has some, from a trace ({', '.join(FORMATS)})"),
    Option(key="prompt_tokens", kind=kinds.WHOLE, group=WHAT, metavar="N",
           shown_default="as --workload draws", help="make all prompts so long"),
    Option(key="output_tokens", kind=kinds.WHOLE, group=WHAT, metavar="N",
           shown_default="as --workload draws", help="ask for so many tokens each time"),
    Option(key="stop_early", kind=kinds.SWITCH, group=WHAT, shown_default="off",
           help="let answers end where the model ends them; else servers are sent ignore_eos"),
    Option(key="seed", kind=kinds.WHOLE, group=WHAT, metavar="N", shown_default="0",
           help="what lengths, words and arrivals are drawn from"),
    Option(key="rate", kind=kinds.REAL, group=WHEN, metavar="R", shown_default="none",
           help="requests per second: arrivals are Poisson, or the trace's own times, scaled"),
    Option(key="concurrency", kind=kinds.WHOLE, group=WHEN, metavar="N",
           shown_default="8, where there is no --rate and no trace with times",
           help="requests under way at any time: a closed loop"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no progress, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What one `equipoise bench serve` was asked for; `progress` is `shown` or `hidden`."""

    url: str = ""
    model: str | None = None
    endpoint: str = ENDPOINTS[0]
    api_key_file: Path | None = None
    timeout: float = 600.0
    requests: int = 200
    workload: str = "sharegpt"
    trace: Path | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    stop_early: bool = False
    seed: int = 0
    rate: float | None = None
    concurrency: int | None = None
    json: Path | None = None
    progress: str = "shown"


if TYPE_CHECKING:
    from equipoise.balancer.requests.workload import Workload
    from equipoise.serve.load_client import LoadPlan, LoadTarget

MAX_REQUESTS = 100_000_000
MAX_TOKENS = 1 << 20
MAX_CONCURRENCY = 65_536
MAX_RATE = 1e6
MAX_TIMEOUT = 86_400.0
DEFAULT_CONCURRENCY = 8


def bench(arguments: Namespace, command: str) -> int:
    """Send requests, print the table; returns 0 if all were answered, 1 if some failed.

    Raises UsageError before anything is sent, EquipoiseError where the server does not answer.
    """
    request = request_of(vars(arguments))
    validate(request)
    # Here, not above: what it imports is optional.
    from equipoise.serve.dependencies import require

    require()
    from equipoise.report.terminal import stdout_colour_mode
    from equipoise.serve.load_client import run_load
    from equipoise.serve.load_result import render

    plan = make_load_plan(request)
    for note in plan.workload.notes:
        print_written(request.progress, [f"{plan.workload.name}: {note}"])
    result = run_load(_target(request), plan, request.progress, sys.stderr)
    if request.json is not None:
        about = {"command": command, "workload": plan.workload.name}
        text = json.dumps(about | result.to_json(), indent=2, allow_nan=False)
        place = write_file(request.json, text + "\n")
        print_written(request.progress, [f"figures: {place}"])
    print(render(result, stdout_colour_mode()), flush=True)
    return 0 if result.answered == result.requests else 1


def request_of(arguments: Mapping[str, Any]) -> BenchRequest:
    """What the command line asks for, its configuration file included."""
    options = {key: value for key, value in arguments.items() if key in BY_KEY or key == "config"}
    return BenchRequest(**request_values(options, BY_KEY))


def validate(request: BenchRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    if not request.url:
        raise UsageError("--url is needed: which server to ask")
    parse_url("--url", request.url)
    check_count("--requests", request.requests, MAX_REQUESTS)
    for flag in ("prompt_tokens", "output_tokens"):
        value = getattr(request, flag)
        if value is not None:
            check_count(f"--{flag.replace('_', '-')}", value, MAX_TOKENS)
    _check_pace(request)
    if not 0 < request.timeout <= MAX_TIMEOUT:
        raise UsageError(
            f"--timeout must be above 0, up to {MAX_TIMEOUT:g}, got {request.timeout:g}"
        )
    if request.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {request.seed}")
    inputs = {} if request.trace is None else {"--trace": request.trace}
    check_outputs(inputs, {"--json": request.json})


def _check_pace(request: BenchRequest) -> None:
    if request.concurrency is not None:
        check_count("--concurrency", request.concurrency, MAX_CONCURRENCY)
        if request.rate is not None:
            raise UsageError("--rate and --concurrency: give one; one waits for answers")
    if request.rate is not None and not 0 < request.rate <= MAX_RATE:
        raise UsageError(f"--rate must be above 0, up to {MAX_RATE:g}, got {request.rate:g}")


def make_load_plan(request: BenchRequest) -> "LoadPlan":
    """Raises UsageError, FormatError."""
    from equipoise.serve.load_client import ClosedLoop, LoadPlan, OpenLoop

    workload = _with_lengths(request, _workload(request))
    if request.rate is not None:
        timed = request.trace is not None and workload.arrivals is not None and workload.count > 1
        scaled = workload.scaled_to_rate(request.rate) if timed else None
        workload = scaled or workload.with_poisson_arrivals(request.rate, request.seed)
    elif request.concurrency is not None or workload.arrivals is None:
        loop = ClosedLoop(request.concurrency or DEFAULT_CONCURRENCY)
        return LoadPlan(workload, loop, request.seed)
    return LoadPlan(workload, OpenLoop(), request.seed)


def _workload(request: BenchRequest) -> "Workload":
    if request.trace is None:
        from equipoise.balancer.requests.workload_generators import generate

        return generate(request.workload, request.requests, request.seed)
    from equipoise.balancer.requests.traces import read_trace
    from equipoise.cli.offline import usage_errors

    with usage_errors("--trace"):
        workload = read_trace(request.trace, most=request.requests)
    return workload.first(min(workload.count, request.requests))


def _with_lengths(request: BenchRequest, workload: "Workload") -> "Workload":
    """With the lengths that were asked for instead of its own."""
    import numpy as np

    prompts, outputs = workload.prompts, workload.outputs
    if request.prompt_tokens is not None:
        prompts = np.full(workload.count, request.prompt_tokens)
    if request.output_tokens is not None:
        outputs = np.full(workload.count, request.output_tokens)
    return replace(workload, hashes=None, prompts=prompts, outputs=outputs)


def _target(request: BenchRequest) -> "LoadTarget":
    from equipoise.serve.load_client import LoadTarget
    from equipoise.serve.openai_protocol import CHAT, COMPLETIONS

    keys = (
        ()
        if request.api_key_file is None
        else read_api_keys("--api-key-file", request.api_key_file)
    )
    return LoadTarget(
        # With /v1, as clients of the API want it, or without: what is appended begins with it.
        url=parse_url("--url", request.url).removesuffix("/v1"),
        model=request.model or "",
        path=CHAT if request.endpoint == "chat" else COMPLETIONS,
        key=keys[0] if keys else None,
        timeout=request.timeout,
        fields=() if request.stop_early else (("ignore_eos", True),),
    )
