"""`equipoise picker`: its options, its checks, and the settings that the picker runs with."""

import ipaddress
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.byte_sizes import BYTES
from equipoise.cli import kinds
from equipoise.cli.command import Command
from equipoise.cli.config import read_config
from equipoise.cli.option_checks import MAX_PORT
from equipoise.cli.process import print_stderr
from equipoise.cli.route import (
    HEALTH,
    LEAST_BYTES,
    LIMITS,
    MAX_COUNT,
    MAX_SECONDS,
    WAITS,
    WHERE,
    WORKERS,
    FrontEndRequest,
    check_bodies,
    check_distinct,
    check_given_once,
    check_reports,
    policy_server_address,
    settings_of,
)
from equipoise.cli.route_workers import report_settings, worker_settings
from equipoise.hal.errors import UsageError
from equipoise.hal.support.working_directory import search_working_directory
from equipoise.option import SECONDS, Option, options_of
from equipoise.serve.picker.settings import (
    DnsEndpoints,
    EndpointsFile,
    EndpointSource,
    PickerLimits,
    PickerPorts,
    PickerSettings,
    PickerTimeouts,
    StaticEndpoints,
    TokenSource,
)
from equipoise.serve.settings import MIB, HealthSettings, WorkerSettings

PICKER = """\
An endpoint picker of the Gateway API Inference Extension: Envoy asks it which worker a
request goes to, and waits until one has a free slot. Needs the extra
`picker`: pip install '.[picker]' in a clone."""
EXAMPLES = """\
examples:
  equipoise picker --workers http://10.0.0.1:8000 http://10.0.0.2:8000 --slots 128
  equipoise picker --endpoints-file endpoints.yaml --host 0.0.0.0
  equipoise picker --endpoints-name workers.default.svc --endpoints-ports 8000,8001

exit code: 0 ended by a signal, 1 requests that waited for a worker were refused then,
2 bad input, 3 a part of it failed"""
_PORTS, _LIMITS, _TIMEOUTS = PickerPorts(), PickerLimits(), PickerTimeouts()
MAX_FALLBACKS = 8
MAX_BODY = 2046 * MIB
"""Bytes: gRPC counts those of a message in 31 bits, and 1 MiB of it is for all but the body."""


@dataclass(frozen=True, kw_only=True)
class PickerRequest(FrontEndRequest):
    """What one `equipoise picker` was asked for."""

    # fmt: off
    workers: Annotated[tuple[object, ...], Option(
        "endpoints, http://IP:PORT each; in a file also objects with url, name, slots, kv_tokens "
        "and headers, as of `equipoise route`", WORKERS, kind=kinds.WORKERS,
        default="one of these three is required")] = ()
    endpoints_file: Annotated[Path | None, Option(
        "YAML with `workers:`, which is read again when it changes", WORKERS)] = None
    endpoints_name: Annotated[str | None, Option(
        "a name in DNS, whose addresses are the endpoints, such as a headless service", WORKERS
    )] = None
    endpoints_ports: Annotated[str | None, Option(
        "ports of each address of --endpoints-name, one for each data-parallel rank", WORKERS,
        needs=("endpoints_name", "the others have ports of their own"),
        metavar="PORT,...", default="8000")] = None
    tokens: Annotated[TokenSource | None, Option(
        "where tokens of answers are known from: chunks that Envoy sends, a counter of the "
        "worker's metrics, or none", WORKERS,
        default="metrics with --metrics generated=NAME, else chunks")] = None
    sheddable: Annotated[str | None, Option(
        "objectives (x-gateway-inference-objective) whose requests are refused where they would "
        "have to wait (429)", WORKERS, metavar="NAME,...")] = None
    port: Annotated[int, Option(
        "gRPC port for Envoy; 0 picks a free one", WHERE, least=0, most=MAX_PORT, metavar="PORT"
    )] = _PORTS.grpc
    health_port: Annotated[int, Option(
        "port for gRPC health checks, without TLS", WHERE, least=0, most=MAX_PORT, metavar="PORT"
    )] = _PORTS.health
    metrics_port: Annotated[int, Option(
        "port for /metrics, /ready, /health and /endpoints", WHERE,
        least=0, most=MAX_PORT, metavar="PORT")] = _PORTS.http
    max_body: Annotated[int, Option(
        "longest body of a request (413), which fits a message of gRPC", LIMITS, kind=BYTES,
        least=LEAST_BYTES, most=MAX_BODY, rare=True)] = _LIMITS.body
    max_concurrency: Annotated[int, Option(
        "requests at once (429)", LIMITS, least=1, most=MAX_COUNT)] = _LIMITS.concurrency
    fallbacks: Annotated[int, Option(
        "endpoints that an answer names after the first, for Envoy's retries", LIMITS,
        least=0, most=MAX_FALLBACKS)] = _LIMITS.fallbacks
    drain_timeout: Annotated[float, Option(
        "for requests under way, of an endpoint that left the list, and of the picker after a "
        "signal to end", WAITS, kind=SECONDS, least=0, most=MAX_SECONDS)] = _TIMEOUTS.drain
    # fmt: on


def _listed_from_yaml(value: object) -> object:
    return () if value == [] else kinds.WORKERS.from_yaml(value)


LISTED = replace(
    options_of(PickerRequest)["workers"],
    kind=replace(kinds.WORKERS, from_yaml=_listed_from_yaml),
)
"""`workers` of an endpoints file, which may be empty for the time being."""


def picker(request: PickerRequest, command: str) -> int:
    """Serve until a signal ends it; 0, or 1 if requests were refused then.

    Raises UsageError before anything listens.
    """
    settings = picker_settings(request)
    # Here, not above: what it imports is optional.
    from equipoise.serve.dependencies import require_picker

    require_picker()
    from equipoise.balancer.requests.policy_factory import routing_policy_factory
    from equipoise.serve.picker.server import serve_picker

    policy, options = policy_of(request, settings.tokens)
    search_working_directory()
    return serve_picker(settings, routing_policy_factory(policy, options), print_stderr)


def policy_of(request: PickerRequest, tokens: TokenSource) -> tuple[str, dict[str, object]]:
    """The name of the policy, and its options."""
    policy, options = request.policy, dict(request.policy_options)
    if policy in POLICIES and tokens is not TokenSource.CHUNKS:
        # Without chunks nobody says when a step is over: the policy would wait for it in vain.
        options.setdefault("lockstep", False)
    return policy, options


def picker_settings(request: PickerRequest) -> PickerSettings:
    """Raises UsageError naming the option, what it was and what it may be."""
    check_given_once(request)
    source = endpoint_source(request)
    reports = report_settings(dict(request.metrics), _examples(source))
    counted = reports is not None and reports.generated is not None
    tokens = request.tokens or (TokenSource.METRICS if counted else TokenSource.CHUNKS)
    if tokens is TokenSource.METRICS and not counted:
        raise UsageError("--tokens metrics needs --metrics generated=NAME: the counter to read")
    check_reports(request.policy, reports)
    check_bodies(request.max_body, request.max_buffered)
    return PickerSettings(
        endpoints=source,
        ports=_ports(request),
        limits=PickerLimits(**settings_of(request, LIMITS)),
        timeouts=PickerTimeouts(**settings_of(request, WAITS)),
        health=HealthSettings(**settings_of(request, HEALTH)),
        reports=reports,
        policy_server=policy_server_address(request.policy_server),
        sheddable=_names(request.sheddable),
        tokens=tokens,
    )


def endpoint_source(request: PickerRequest) -> EndpointSource:
    """Where the endpoints are known from. Raises UsageError unless it is one place."""
    keys = ("workers", "endpoints_file", "endpoints_name")
    sources = [COMMAND.options[key].name for key in keys if getattr(request, key)]
    if len(sources) != 1:
        names = " and ".join(sources) or "none"
        raise UsageError(
            f"one of --workers, --endpoints-file, --endpoints-name is needed, got {names}"
        )
    slots, kv_tokens = request.slots, request.kv_tokens
    if request.workers:
        return StaticEndpoints(workers=endpoints_of(request.workers, slots, kv_tokens))
    if request.endpoints_file is not None:

        def read(path: Path) -> tuple[WorkerSettings, ...]:
            return read_endpoints(path, slots, kv_tokens)

        return EndpointsFile(path=request.endpoints_file, read=read)
    assert request.endpoints_name is not None
    _check_dns_name(request.endpoints_name)
    # Slots and KV tokens are checked as those of a worker are.
    [example] = worker_settings(["http://127.0.0.1:8000"], slots, kv_tokens)
    return DnsEndpoints(
        name=request.endpoints_name,
        ports=_port_list(request.endpoints_ports or "8000"),
        slots=example.slots,
        kv_tokens=example.kv_tokens,
    )


def read_endpoints(path: Path, slots: int, kv_tokens: int | None) -> tuple[WorkerSettings, ...]:
    """The endpoints of a file; none where it says `workers: []`. Raises UsageError."""
    _check_regular(path)
    config = read_config(path, {"workers": LISTED})
    if "workers" not in config:
        # Empty is also what a file is between its truncation and its new text: no word of a list.
        raise UsageError(f"{path} has no `workers:`; where there are none it is `workers: []`")
    entries = config["workers"]
    return endpoints_of(entries, slots, kv_tokens) if entries else ()


def endpoints_of(
    entries: Sequence[object], slots: int, kv_tokens: int | None
) -> tuple[WorkerSettings, ...]:
    """Raises UsageError naming the entry, where one is no IP:PORT."""
    workers = worker_settings(entries, slots, kv_tokens)
    for one in workers:
        parts = urlsplit(one.url)
        try:
            ipaddress.ip_address(parts.hostname or "")
            has_address = parts.port is not None and not parts.path and "%" not in parts.netloc
        except ValueError:
            has_address = False
        if not has_address or parts.scheme != "http":
            raise UsageError(
                f"workers: {one.url} has to be http://IP:PORT: Envoy takes no names, no zones and "
                "no paths, and has the TLS of workers in its own configuration"
            )
    check_distinct(workers)
    return workers


def _check_dns_name(name: str) -> None:
    """Raises UsageError for what no resolver can be asked for."""
    try:
        name.encode("idna")
    except UnicodeError:
        expected = "a name of DNS, whose parts have 1 to 63 letters each"
        raise UsageError(f"--endpoints-name: expected {expected}, got {name!r}") from None


def _check_regular(path: Path) -> None:
    """Raises UsageError for a pipe and the like: the event loop would wait for who writes it."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # to read it says why
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a regular file: the list of endpoints is read repeatedly")


def _examples(source: EndpointSource) -> tuple[WorkerSettings, ...]:
    """Endpoints to check the names of metrics with: a file is read again, and may be empty yet."""
    match source:
        case StaticEndpoints(workers=workers):
            return workers
        case EndpointsFile():
            return source.read(source.path)
        case DnsEndpoints():
            example = WorkerSettings(url="http://endpoint", name="each", kv_tokens=source.kv_tokens)
            return (example,)


def _names(text: str | None) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(",")) if text is not None else frozenset()
    if "" in names:
        raise UsageError(f"--sheddable: expected names with commas between, got {text!r}")
    return names


def _port_list(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    ports = tuple(int(word) for word in words if word.isascii() and word.isdigit())
    valid = len(ports) == len(words) == len(set(ports))
    if not valid or not all(1 <= port <= MAX_PORT for port in ports):
        raise UsageError(f"--endpoints-ports: expected ports such as 8000,8001, got {text!r}")
    return ports


def _ports(request: PickerRequest) -> PickerPorts:
    return PickerPorts(
        host=request.host,
        certificate=request.tls_cert,
        private_key=request.tls_key,
        grpc=request.port,
        health=request.health_port,
        http=request.metrics_port,
    )


COMMAND = Command(PickerRequest, picker, description=PICKER, examples=EXAMPLES)
