"""`equipoise route`: its options, its checks, and the settings that the proxy runs with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.byte_sizes import BYTES
from equipoise.cli import kinds
from equipoise.cli.command import Command
from equipoise.cli.offline import warn
from equipoise.cli.option_checks import MAX_PORT
from equipoise.cli.process import print_stderr
from equipoise.cli.route_workers import report_settings, worker_settings
from equipoise.hal.errors import UsageError
from equipoise.hal.support.working_directory import search_working_directory
from equipoise.input_files import read_input
from equipoise.option import SECONDS, Option, options_of
from equipoise.serve.settings import (
    AccessSettings,
    ClientRank,
    HealthSettings,
    Limits,
    PolicyServerAddress,
    ReportSettings,
    RouteSettings,
    Timeouts,
    WorkerSettings,
)

ROUTE = """\
A proxy in front of several servers of the OpenAI API: binds each request to one of
them when it has a free slot, so that none makes the others wait. Needs
the extra `serve`: pip install '.[serve]' in a clone."""
EXAMPLES = """\
examples:
  equipoise route --config route.yaml
  equipoise route --workers http://127.0.0.1:8000 http://127.0.0.1:8001 --slots 128
  equipoise route --config route.yaml --port 9443 --tls-cert cert.pem --tls-key key.pem

exit code: 0 ended by a signal after all requests had ended, 1 some were cut
off, 2 bad input, 3 a part of it failed"""
WHERE, WORKERS, WAITS = "listening", "workers", "waits"
LIMITS, HEALTH, WATCHING = "limits", "health of workers", "watching"
_ACCESS, _LIMITS, _TIMEOUTS, _HEALTH = AccessSettings(), Limits(), Timeouts(), HealthSettings()
MAX_COUNT = 1 << 31
MAX_SECONDS = 7 * 86_400.0
"""Seconds: a week."""
LEAST_BYTES = 1 << 10
_wait = partial(Option, group=WAITS, kind=SECONDS, least=0, above=True, most=MAX_SECONDS)
_pause = partial(Option, group=WAITS, kind=SECONDS, least=0, most=MAX_SECONDS)
_health_wait = partial(
    Option, group=HEALTH, kind=SECONDS, least=0, above=True, most=MAX_SECONDS, rare=True
)
_health_count = partial(Option, group=HEALTH, least=1, most=MAX_COUNT, rare=True)


@dataclass(frozen=True, kw_only=True)
class PolicyRequest:
    """What every command is asked for that has a routing policy."""

    # fmt: off
    policy: Annotated[str, Option(
        "which worker serves a request, and when that is decided; or PACKAGE:OBJECT", WORKERS
    )] = "fit"
    policy_options: Annotated[tuple[tuple[str, object], ...], Option(
        "how the policy is set, such as window=32 or lockstep=false; a mapping in a file", WORKERS,
        kind=kinds.SETTINGS, default="as the policy is published")] = ()
    host: Annotated[str, Option("address to listen on", WHERE, metavar="ADDRESS")] = _ACCESS.host
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class FrontEndRequest(PolicyRequest):
    """What a proxy and a picker are asked for alike."""

    # fmt: off
    policy_server: Annotated[str | None, Option(
        "an `equipoise policy-server` that decides for several of these; --policy is for the time "
        "while it is away", WORKERS, metavar="HOST:PORT")] = None
    slots: Annotated[int, Option(
        "requests that a worker has at once, where its entry does not say", WORKERS)] = 256
    kv_tokens: Annotated[int | None, Option(
        "tokens in a worker's KV cache, where its entry does not say", WORKERS,
        metavar="TOKENS", default="no limit")] = None
    metrics: Annotated[tuple[tuple[str, object], ...], Option(
        "names of the Prometheus metrics by which workers report load, for policies that need to "
        "know: waiting=NAME running=NAME, kv_usage=NAME or tokens=NAME, rank_label=LABEL, "
        "interval=SECONDS, timeout=SECONDS, path=/metrics; for `equipoise picker` also "
        "generated=NAME, a counter of generated tokens, by which --tokens metrics counts", WORKERS,
        kind=kinds.SETTINGS, default="workers are not asked")] = ()
    tls_cert: Annotated[Path | None, Option("certificates, as PEM", WHERE, default="no TLS")] = None
    tls_key: Annotated[Path | None, Option(
        "private key, as PEM", WHERE, default="in --tls-cert",
        needs=("tls_cert", "a key alone certifies nothing"))] = None
    max_body: Annotated[int, Option(
        "longest body of a request (413)", LIMITS, kind=BYTES, least=LEAST_BYTES, rare=True
    )] = _LIMITS.body
    max_buffered: Annotated[int, Option(
        "bodies of all requests together (429)", LIMITS, kind=BYTES, rare=True)] = _LIMITS.buffered
    max_queued: Annotated[int, Option(
        "requests that wait for a worker (429)", LIMITS, least=0, most=MAX_COUNT)] = _LIMITS.queued
    queue_timeout: Annotated[float, _wait("for a worker with a free slot (503)")] = _TIMEOUTS.queue
    health_interval: Annotated[float, _health_wait(
        "from one GET /health to the next; a tenth of it while in doubt")] = _HEALTH.interval
    health_timeout: Annotated[float, _health_wait("for its answer")] = _HEALTH.timeout
    draining_after: Annotated[int, _health_count(
        "questions without a good answer, after which a worker gets no more requests"
    )] = _HEALTH.draining_after
    lost_after: Annotated[int, _health_count(
        "questions without any answer, after which what a worker had is given up"
    )] = _HEALTH.lost_after
    serving_after: Annotated[int, _health_count(
        "good answers in a row, after which a worker gets requests again")] = _HEALTH.serving_after
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class RouteRequest(FrontEndRequest):
    """What one `equipoise route` was asked for."""

    # fmt: off
    workers: Annotated[tuple[object, ...], Option(
        "servers to bind requests to; in a file also objects with url, name, slots, kv_tokens and "
        "headers, so that several workers may be ranks of one server", WORKERS,
        kind=kinds.WORKERS, why_required="--workers URL ..., or `workers:` in --config")]
    worker_key_file: Annotated[Path | None, Option(
        "API key that workers are sent", WORKERS, default="the client's own is passed on")] = None
    client_rank: Annotated[ClientRank, Option(
        "whether a client may choose a worker, by X-data-parallel-rank or by data_parallel_rank in "
        "its body", WORKERS)] = ClientRank.FORBID
    port: Annotated[int, Option(
        "port to listen on; 0 picks a free one", WHERE, least=0, most=MAX_PORT, metavar="PORT"
    )] = _ACCESS.port
    api_key_file: Annotated[Path | None, Option(
        "keys that admit a client, one a line", WHERE)] = None
    allowed_origins: Annotated[tuple[str, ...], Option(
        "origins of web pages that browsers let use the API; * for all, none for none", WHERE,
        kind=kinds.ORIGINS)] = _ACCESS.allowed_origins
    max_header: Annotated[int, Option(
        "longest head of a request (431)", LIMITS, kind=BYTES, least=LEAST_BYTES, rare=True
    )] = _LIMITS.header
    max_answer: Annotated[int, Option(
        "longest answer that is not streamed (502)", LIMITS, kind=BYTES, rare=True
    )] = _LIMITS.answer
    max_concurrency: Annotated[int, Option(
        "requests at once (429)", LIMITS, least=1, most=MAX_COUNT)] = _LIMITS.concurrency
    max_connections: Annotated[int, Option(
        "connections of clients", LIMITS, least=1, most=MAX_COUNT, rare=True)] = _LIMITS.connections
    attempts: Annotated[int, Option(
        "times that a request is sent to a worker", LIMITS, least=1, most=MAX_COUNT
    )] = _LIMITS.attempts
    connect_timeout: Annotated[float, _wait(
        "for a worker to take a connection (another worker)", rare=True)] = _TIMEOUTS.connect
    first_token_timeout: Annotated[float, _wait(
        "for the first token of a stream (504)")] = _TIMEOUTS.first_token
    token_timeout: Annotated[float, _wait(
        "from one token of a stream to the next (an error event), and for the client to take it"
    )] = _TIMEOUTS.token
    total_timeout: Annotated[float, _wait("for a request altogether (504)")] = _TIMEOUTS.total
    header_timeout: Annotated[float, _wait(
        "for the head of a request (408)", rare=True)] = _TIMEOUTS.header
    body_timeout: Annotated[float, _wait(
        "for the body of a request (408)", rare=True)] = _TIMEOUTS.body
    idle_timeout: Annotated[float, _wait(
        "for the next request of a connection", rare=True)] = _TIMEOUTS.idle
    drain_timeout: Annotated[float, _pause(
        "for requests in the proxy, after a signal to end")] = _TIMEOUTS.drain
    heartbeat_interval: Annotated[float, _pause(
        "after which a stream to which nothing was sent gets a comment; with the first one goes "
        "status 200, and errors are events from then on; 0: none", rare=True)] = _TIMEOUTS.heartbeat
    log: Annotated[Path | None, Option(
        "append what became of each request there, as JSON lines", WATCHING)] = None
    wandb: Annotated[str | None, Option(
        "send charts to this project at Weights & Biases; needs the extra wandb", WATCHING,
        metavar="PROJECT")] = None
    # fmt: on


def route(request: RouteRequest, command: str) -> int:
    """Serve until a signal ends it; 0 if nothing was cut off then, 1 if something was.

    Raises UsageError before anything listens.
    """
    settings = route_settings(request)
    # Here, not above: what it imports is optional.
    from equipoise.serve.dependencies import require

    require()
    from equipoise.balancer.requests.policy_factory import routing_policy_factory
    from equipoise.serve.auth import open_to_all
    from equipoise.serve.server import serve

    search_working_directory()
    factory = routing_policy_factory(request.policy, dict(request.policy_options))
    if open_to_all(settings.access):
        warn(f"--host {settings.access.host}: anybody who reaches it may ask: no --api-key-file")
    return serve(settings, factory, print_stderr)


def route_settings(request: RouteRequest) -> RouteSettings:
    """Raises UsageError naming the option, what it was and what it may be."""
    check_given_once(request)
    workers = worker_settings(request.workers, request.slots, request.kv_tokens)
    reports = report_settings(dict(request.metrics), workers)
    if reports is not None and reports.generated is not None:
        raise UsageError("--metrics: generated is for `equipoise picker`: a proxy counts tokens")
    check_reports(request.policy, reports)
    policy_server = policy_server_address(request.policy_server)
    if policy_server is not None:
        # By their keys a policy server knows which workers of several proxies are the same.
        check_distinct(workers)
    limits = Limits(**settings_of(request, LIMITS))
    check_bodies(limits.body, limits.buffered)
    return RouteSettings(
        workers=workers,
        reports=reports,
        access=_access(request),
        limits=limits,
        timeouts=Timeouts(**settings_of(request, WAITS)),
        health=HealthSettings(**settings_of(request, HEALTH)),
        client_rank=request.client_rank,
        policy_server=policy_server,
        log=request.log,
        wandb=request.wandb,
    )


def check_given_once(request: PolicyRequest) -> None:
    """Raises UsageError where an option of NAME=VALUE has a name twice."""
    for flag, values in (
        ("--policy-options", request.policy_options),
        ("--metrics", request.metrics if isinstance(request, FrontEndRequest) else ()),
    ):
        names = [name for name, _ in values]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"{flag}: {name} is there twice")


def check_distinct(workers: Sequence[WorkerSettings]) -> None:
    """Raises UsageError where two workers have the same url and the same headers."""
    by_key: dict[str, WorkerSettings] = {}
    for one in workers:
        if by_key.setdefault(one.key, one) is not one:
            raise UsageError(f"workers: {one.url} is there twice: give them headers of their ranks")


def policy_server_address(text: str | None) -> PolicyServerAddress | None:
    """Of `HOST:PORT`; None: there is none. Raises UsageError where it is no such text."""
    if text is None:
        return None
    parts = urlsplit("")
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as a resolver is asked for it
    except ValueError:
        host, port = None, None
    if host is None or not port or parts.netloc != text or parts.username is not None:
        raise UsageError(f"--policy-server: expected HOST:PORT, got {text!r}")
    return PolicyServerAddress(host, port)


def settings_of(request: FrontEndRequest, group: str) -> dict[str, Any]:
    """The options of a group, by the fields of the settings that they are for."""
    return {
        key.removeprefix("max_")
        .removeprefix("health_")
        .removesuffix("_timeout")
        .removesuffix("_interval"): getattr(request, key)
        for key, option in options_of(type(request)).items()
        if option.group == group
    }


def check_bodies(body: int, buffered: int) -> None:
    """Raises UsageError where one body of the longest could never be kept."""
    if buffered < body:
        raise UsageError(f"--max-buffered must be at least --max-body ({body}), got {buffered}")


def check_reports(policy: str, reports: ReportSettings | None) -> None:
    """Raises UsageError for a policy that needs load reports and would get none."""
    if reports is None and policy in POLICIES and POLICIES[policy].report_interval:
        # It would go on by its own picks, which count for ever: a worker that comes back has none.
        raise UsageError(f"--policy {policy} decides by reports of workers: --metrics is needed")


def _access(request: RouteRequest) -> AccessSettings:
    path, own = request.worker_key_file, request.api_key_file
    worker_keys = () if path is None else read_api_keys("--worker-key-file", path)
    if len(worker_keys) > 1:
        raise UsageError(f"--worker-key-file: {path} has more than one key")
    return AccessSettings(
        host=request.host,
        port=request.port,
        keys=() if own is None else read_api_keys("--api-key-file", own),
        worker_key=worker_keys[0] if worker_keys else None,
        certificate=request.tls_cert,
        private_key=request.tls_key,
        allowed_origins=() if request.allowed_origins == ("none",) else request.allowed_origins,
    )


def read_api_keys(flag: str, path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line, at least one. Raises UsageError that names the flag."""
    try:
        text = read_input(path).decode()
    except OSError as error:
        raise UsageError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag}: {path} is not UTF-8") from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        # An empty file of keys must not mean that every client is admitted.
        raise UsageError(f"{flag}: {path} has no key in it")
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"{flag}: {path} has a key that no header can carry")
    return keys


COMMAND = Command(RouteRequest, route, description=ROUTE, examples=EXAMPLES)
