"""`equipoise route`: its options, its checks, and the settings that the proxy runs with."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.cli import kinds
from equipoise.cli.config import read_config
from equipoise.cli.offline import warn
from equipoise.cli.option import REQUIRED, Option
from equipoise.cli.process import print_stderr
from equipoise.cli.route_workers import report_settings, worker_settings
from equipoise.cli.validation import MAX_PORT
from equipoise.hal.errors import UsageError
from equipoise.input_files import read_input
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

WHERE, WORKERS, WAITS = "listening", "workers", "waits"
LIMITS, HEALTH, WATCHING = "limits", "health of workers", "watching"
_ACCESS, _LIMITS, _TIMEOUTS, _HEALTH = AccessSettings(), Limits(), Timeouts(), HealthSettings()


def _wait(key: str, default: float, help_text: str) -> Option:
    return Option(key=f"{key}_timeout", kind=kinds.SECONDS, group=WAITS, metavar="SECONDS",
                  shown_default=f"{default:g}", help=help_text)  # fmt: skip


def _bytes(key: str, default: int, help_text: str) -> Option:
    default_text = f"{default >> 20}MiB" if default >= 1 << 20 else f"{default >> 10}KiB"
    return Option(key=key, kind=kinds.BYTES, group=LIMITS, metavar="SIZE",
                  shown_default=default_text, help=help_text)  # fmt: skip


def _count(key: str, default: int, group: str, help_text: str) -> Option:
    return Option(key=key, kind=kinds.WHOLE, group=group, metavar="N", shown_default=str(default),
                  help=help_text)  # fmt: skip


OPTIONS = (
    Option(key="workers", kind=kinds.WORKERS, group=WORKERS, metavar="URL",
           shown_default=REQUIRED,
           help="servers to bind requests to; in a file also objects with url, name, slots, "
           "kv_tokens "
           "and headers, so that several workers may be ranks of one server"),
    Option(key="policy", kind=kinds.NAME, group=WORKERS, metavar="NAME", shown_default="fit",
           help="which worker serves a request, and when that is decided; or PACKAGE:OBJECT"),
    Option(key="policy_options", kind=kinds.SETTINGS, group=WORKERS, metavar="NAME=VALUE",
           shown_default="as the policy is published",
           help="how the policy is set, such as front_ends=2; a mapping in a file"),
    Option(key="policy_server", kind=kinds.NAME, group=WORKERS, metavar="HOST:PORT",
           shown_default="none",
           help="an `equipoise policy-server` that decides for several of these; --policy is for "
           "the time while it is away"),
    Option(key="slots", kind=kinds.WHOLE, group=WORKERS, metavar="N", shown_default="256",
           help="requests that a worker has at once, where its entry does not say"),
    Option(key="kv_tokens", kind=kinds.WHOLE, group=WORKERS, metavar="TOKENS",
           shown_default="no limit",
           help="tokens in a worker's KV cache, where its entry does not say"),
    Option(key="worker_key_file", kind=kinds.PATH, group=WORKERS, metavar="FILE",
           shown_default="the client's own is passed on", help="API key that workers are sent"),
    Option(key="client_rank", kind=kinds.CLIENT_RANK, group=WORKERS, metavar="|".join(ClientRank),
           shown_default=ClientRank.FORBID.value,
           help="whether a client may choose a worker, by X-data-parallel-rank or by "
           "data_parallel_rank in its body"),
    Option(key="host", kind=kinds.NAME, group=WHERE, metavar="ADDRESS",
           shown_default=_ACCESS.host, help="address to listen on"),
    Option(key="port", kind=kinds.WHOLE, group=WHERE, metavar="PORT",
           shown_default=str(_ACCESS.port), help="port to listen on; 0 picks a free one"),
    Option(key="api_key_file", kind=kinds.PATH, group=WHERE, metavar="FILE", shown_default="none",
           help="keys that admit a client, one a line"),
    Option(key="tls_cert", kind=kinds.PATH, group=WHERE, metavar="FILE", shown_default="no TLS",
           help="certificates, as PEM"),
    Option(key="tls_key", kind=kinds.PATH, group=WHERE, metavar="FILE",
           shown_default="in --tls-cert", help="private key, as PEM"),
    Option(key="allowed_origins", kind=kinds.ORIGINS, group=WHERE, metavar="ORIGIN",
           shown_default="*",
           help="origins of web pages that browsers let use the API; * for all, none for none"),
    _bytes("max_body", _LIMITS.body, "longest body of a request (413)"),
    _bytes("max_header", _LIMITS.header, "longest head of a request (431)"),
    _bytes("max_buffered", _LIMITS.buffered, "bodies of all requests together (429)"),
    _bytes("max_answer", _LIMITS.answer, "longest answer that is not streamed (502)"),
    _count("max_concurrency", _LIMITS.concurrency, LIMITS, "requests at once (429)"),
    _count("max_queued", _LIMITS.queued, LIMITS, "requests that wait for a worker (429)"),
    _count("max_connections", _LIMITS.connections, LIMITS, "connections of clients"),
    _count("attempts", _LIMITS.attempts, LIMITS, "times that a request is sent to a worker"),
    _wait("connect", _TIMEOUTS.connect, "for a worker to take a connection (another worker)"),
    _wait("first_token", _TIMEOUTS.first_token, "for the first token of a stream (504)"),
    _wait("token", _TIMEOUTS.token, "from one token of a stream to the next (an error event), and "
          "for the client to take it"),
    _wait("total", _TIMEOUTS.total, "for a request altogether (504)"),
    _wait("queue", _TIMEOUTS.queue, "for a worker with a free slot (503)"),
    _wait("header", _TIMEOUTS.header, "for the head of a request (408)"),
    _wait("body", _TIMEOUTS.body, "for the body of a request (408)"),
    _wait("idle", _TIMEOUTS.idle, "for the next request of a connection"),
    _wait("drain", _TIMEOUTS.drain, "for requests in the proxy, after a signal to end"),
    Option(key="heartbeat_interval", kind=kinds.SECONDS, group=WAITS, metavar="SECONDS",
           shown_default=f"{_TIMEOUTS.heartbeat:g}",
           help="after which a stream to which nothing was sent gets a comment; with the first one "
           "goes status 200, and errors are events from then on; 0: none"),
    Option(key="health_interval", kind=kinds.SECONDS, group=HEALTH, metavar="SECONDS",
           shown_default=f"{_HEALTH.interval:g}",
           help="from one GET /health to the next; a tenth of it while in doubt"),
    Option(key="health_timeout", kind=kinds.SECONDS, group=HEALTH, metavar="SECONDS",
           shown_default=f"{_HEALTH.timeout:g}", help="for its answer"),
    _count("draining_after", _HEALTH.draining_after, HEALTH,
           "questions without a good answer, after which a worker gets no more requests"),
    _count("lost_after", _HEALTH.lost_after, HEALTH,
           "questions without any answer, after which what a worker had is given up"),
    _count("serving_after", _HEALTH.serving_after, HEALTH,
           "good answers in a row, after which a worker gets requests again"),
    Option(key="metrics", kind=kinds.SETTINGS, group=HEALTH, metavar="NAME=VALUE",
           shown_default="workers are not asked",
           help="names of the Prometheus metrics by which workers report load, for policies that "
           "need to know: waiting=NAME running=NAME, kv_usage=NAME or tokens=NAME, "
           "rank_label=LABEL, interval=SECONDS, timeout=SECONDS, path=/metrics"),
    Option(key="log", kind=kinds.PATH, group=WATCHING, metavar="FILE", shown_default="none",
           help="append what became of each request there, as JSON lines"),
    Option(key="wandb", kind=kinds.NAME, group=WATCHING, metavar="PROJECT", shown_default="none",
           help="send charts to this project at Weights & Biases; needs the extra wandb"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class RouteRequest:
    """What one `equipoise route` was asked for: options as they were given, by key."""

    workers: tuple[object, ...] = ()
    policy: str = "fit"
    policy_options: tuple[tuple[str, object], ...] = ()
    policy_server: str | None = None
    metrics: tuple[tuple[str, object], ...] = ()
    slots: int = 256
    kv_tokens: int | None = None
    worker_key_file: Path | None = None
    api_key_file: Path | None = None
    client_rank: ClientRank = ClientRank.FORBID
    host: str = _ACCESS.host
    port: int = _ACCESS.port
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allowed_origins: tuple[str, ...] = _ACCESS.allowed_origins
    log: Path | None = None
    wandb: str | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    """Those of limits, waits and health."""


MAX_COUNT = 1 << 31
MAX_SECONDS = 7 * 86_400.0
"""Seconds: a week."""
MAY_BE_ZERO = ("max_queued", "drain_timeout", "heartbeat_interval", "fallbacks")
MIN_BYTES = {"max_body": 1 << 10, "max_header": 1 << 10}


def route(arguments: Namespace) -> int:
    """Serve until a signal ends it; 0 if nothing was cut off then, 1 if something was.

    Raises UsageError before anything listens.
    """
    request = request_of(vars(arguments))
    settings = route_settings(request)
    # Here, not above: what it imports is optional.
    from equipoise.serve.dependencies import require

    require()
    from equipoise.balancer.requests.policy_factory import routing_policy_factory
    from equipoise.serve.auth import open_to_all
    from equipoise.serve.server import serve

    factory = routing_policy_factory(request.policy, dict(request.policy_options))
    if open_to_all(settings.access):
        warn(f"--host {settings.access.host}: anybody who reaches it may ask: no --api-key-file")
    return serve(settings, factory, print_stderr)


def request_of(arguments: Mapping[str, Any]) -> RouteRequest:
    """What the command line asks for, its configuration file included."""
    file = read_config(arguments["config"], BY_KEY) if "config" in arguments else {}
    options = {key: value for key, value in arguments.items() if key in BY_KEY}
    values = file | options
    own = {field.name for field in fields(RouteRequest)}
    limits = {key: values.pop(key) for key in set(values) - own}
    for key in ("workers", "policy_options", "metrics", "allowed_origins"):
        if key in values:
            values[key] = tuple(values[key])
    check_given_once(values)
    return RouteRequest(**values, others=limits)


def route_settings(request: RouteRequest) -> RouteSettings:
    """Raises UsageError naming the option, what it was and what it may be."""
    check_ranges(request.others, BY_KEY)
    check_port(BY_KEY["port"], request.port)
    check_tls_files(request.tls_cert, request.tls_key)
    by_group = {
        group: {settings_field(o.key): request.others[o.key] for o in OPTIONS
                if o.group == group and o.key in request.others}
        for group in (LIMITS, WAITS, HEALTH)
    }  # fmt: skip
    workers = worker_settings(request.workers, request.slots, request.kv_tokens)
    reports = report_settings(dict(request.metrics), workers)
    if reports is not None and reports.generated is not None:
        raise UsageError("--metrics: generated is for `equipoise picker`: a proxy counts tokens")
    check_reports(request.policy, reports)
    policy_server = policy_server_address(request.policy_server)
    if policy_server is not None:
        # By their keys a policy server knows which workers of several proxies are the same.
        check_distinct(workers)
    limits = Limits(**whole_numbers(by_group[LIMITS]))
    check_bodies(limits.body, limits.buffered)
    return RouteSettings(
        workers=workers,
        reports=reports,
        access=_access(request),
        limits=limits,
        timeouts=Timeouts(**by_group[WAITS]),
        health=HealthSettings(**by_group[HEALTH]),  # type: ignore[arg-type]  # as their kinds say
        client_rank=request.client_rank,
        policy_server=policy_server,
        log=request.log,
        wandb=request.wandb,
    )


def check_given_once(values: Mapping[str, Any]) -> None:
    """Raises UsageError where an option of NAME=VALUE has a name twice."""
    for key in ("policy_options", "metrics"):
        names = [name for name, _ in values.get(key, ())]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"{BY_KEY[key].name}: {name} is there twice")


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
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as a resolver is asked for it
    except ValueError:
        host, port = None, None
    if host is None or not port or parts.netloc != text or parts.username is not None:
        raise UsageError(f"--policy-server: expected HOST:PORT, got {text!r}")
    return PolicyServerAddress(host, port)


def settings_field(key: str) -> str:
    """The field of settings that an option of a limit, a timeout or health is for."""
    short = key.removeprefix("max_").removeprefix("health_").removesuffix("_timeout")
    return short.removesuffix("_interval")


def whole_numbers(values: Mapping[str, float]) -> dict[str, int]:
    """Of options whose kinds are whole numbers."""
    return {key: int(value) for key, value in values.items()}


def check_ranges(values: Mapping[str, float], options: Mapping[str, Option]) -> None:
    """Raises UsageError for a limit, a timeout or a setting of health that is out of range."""
    for key, value in values.items():
        option = options[key]
        least = MIN_BYTES.get(key, 0 if key in MAY_BE_ZERO else 1)
        if option.group == WAITS or key.startswith("health_"):
            if not 0 <= value <= MAX_SECONDS or (not value and key not in MAY_BE_ZERO):
                raise UsageError(
                    f"{option.name} must be above 0, up to {MAX_SECONDS:g} seconds, got {value:g}"
                )
        elif not least <= value <= (1 << 60 if option.group == LIMITS else MAX_COUNT):
            raise UsageError(f"{option.name} must be at least {least}, got {value}")


def check_bodies(body: int, buffered: int) -> None:
    """Raises UsageError where one body of the longest could never be kept."""
    if buffered < body:
        raise UsageError(f"--max-buffered must be at least --max-body ({body}), got {buffered}")


def check_port(option: Option, port: int) -> None:
    """Raises UsageError for a port that there is not; 0 is a free one."""
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"{option.name} must be 0 to {MAX_PORT}, got {port}")


def check_tls_files(certificate: Path | None, private_key: Path | None) -> None:
    """Raises UsageError for a key without a certificate."""
    if private_key is not None and certificate is None:
        raise UsageError("--tls-key needs --tls-cert")


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
