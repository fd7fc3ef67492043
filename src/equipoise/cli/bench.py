"""`equipoise bench serve`: its options, its checks, and the run from a load plan to figures."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from equipoise.balancer.requests.catalogue import FORMATS, WORKLOADS
from equipoise.cli.command import Command, Settings
from equipoise.cli.offline import check_outputs, print_written, usage_errors, write_figures
from equipoise.cli.route import read_api_keys
from equipoise.cli.route_workers import parse_url
from equipoise.hal.errors import UsageError
from equipoise.option import OUTPUT, SECONDS, Option, choice

WHERE, WHAT, WHEN = "server", "requests", "arrivals"
BENCH = """\
Send requests to a server of the OpenAI API, or to the proxy, and say how long it took
to answer: time to first token, time per output token, latency, throughput. Needs
the extra `serve`: pip install '.[serve]' in a clone."""
EXAMPLES = """\
examples:
  equipoise bench serve --url http://127.0.0.1:9000 --concurrency 64 --requests 1000
  equipoise bench serve --url http://127.0.0.1:9000 --rate 12 --workload prop
  equipoise bench serve --url http://127.0.0.1:9000 --trace trace.csv --json figures.json

exit code: 0 all answered, 1 some failed, 2 bad input, nothing was sent, 3 the server does
not say which model it has"""
MAX_REQUESTS = 100_000_000
MAX_TOKENS = 1 << 20
MAX_CONCURRENCY = 65_536
MAX_RATE = 1e6
MAX_TIMEOUT = 86_400.0
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Settings):
    """What one `equipoise bench serve` was asked for."""

    # fmt: off
    url: Annotated[str, Option(
        "of the server, or of the proxy", WHERE, metavar="URL", why_required="which server to ask")]
    model: Annotated[str | None, Option(
        "model to ask for", WHERE, default="the first that the server has")] = None
    endpoint: Annotated[Literal["chat", "completions"], Option(
        "which of the API's two ways to ask", WHERE)] = "chat"
    api_key_file: Annotated[Path | None, Option("key to send", WHERE)] = None
    timeout: Annotated[float, Option(
        "longest that a request may take", WHERE, kind=SECONDS,
        least=0, above=True, most=MAX_TIMEOUT)] = 600.0
    requests: Annotated[int, Option(
        "how many to send; at most as many as --trace has", WHAT, least=1, most=MAX_REQUESTS)] = 200
    workload: Annotated[str, Option(
        "lengths of prompts and outputs: "
        + "; ".join(f"{name}: {about}" for name, about in WORKLOADS.items()), WHAT,
        kind=choice(tuple(WORKLOADS)))] = "sharegpt"
    trace: Annotated[Path | None, Option(
        f"take lengths, and times where it has some, from a trace ({', '.join(FORMATS)})", WHAT
    )] = None
    prompt_tokens: Annotated[int | None, Option(
        "make all prompts so long", WHAT, least=1, most=MAX_TOKENS, default="as --workload draws"
    )] = None
    output_tokens: Annotated[int | None, Option(
        "ask for so many tokens each time", WHAT,
        least=1, most=MAX_TOKENS, default="as --workload draws")] = None
    stop_early: Annotated[bool, Option(
        "let answers end where the model ends them; else servers are sent ignore_eos", WHAT
    )] = False
    seed: Annotated[int, Option(
        "what lengths, words and arrivals are drawn from", WHAT, least=0)] = 0
    rate: Annotated[float | None, Option(
        "requests per second: arrivals are Poisson, or the trace's own times, scaled", WHEN,
        least=0, above=True, most=MAX_RATE, metavar="R")] = None
    concurrency: Annotated[int | None, Option(
        "requests under way at any time: a closed loop", WHEN, least=1, most=MAX_CONCURRENCY,
        default="8, where there is no --rate and no trace with times")] = None
    json: Annotated[Path | None, Option("write the figures there", OUTPUT)] = None
    # fmt: on


if TYPE_CHECKING:
    from equipoise.balancer.requests.workload import Workload
    from equipoise.serve.load_client import LoadPlan, LoadTarget


def bench(request: BenchRequest, command: str) -> int:
    """Send requests, print the table; returns 0 if all were answered, 1 if some failed.

    Raises UsageError before anything is sent, EquipoiseError where the server does not answer.
    """
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
    about = {"command": command, "workload": plan.workload.name}
    print_written(request.progress, write_figures(request.json, about | result.to_json()))
    print(render(result, stdout_colour_mode()), flush=True)
    return 0 if result.answered == result.requests else 1


def validate(request: BenchRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    parse_url("--url", request.url)
    if request.rate is not None and request.concurrency is not None:
        raise UsageError("--rate and --concurrency: give one; one waits for answers")
    inputs = {} if request.trace is None else {"--trace": request.trace}
    check_outputs(inputs, {"--json": request.json})


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


COMMAND = Command(BenchRequest, bench, description=BENCH, examples=EXAMPLES)
