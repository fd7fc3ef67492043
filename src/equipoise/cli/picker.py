"""`equipoise picker`: its options, its checks, and the settings that the picker runs with."""

import ipaddress
import stat
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.cli import kinds, route
from equipoise.cli.config import read_config
from equipoise.cli.option import REQUIRED, Option
from equipoise.cli.process import print_stderr
from equipoise.cli.route import (
    HEALTH,
    LIMITS,
    WAITS,
    WHERE,
    WORKERS,
    check_bodies,
    check_distinct,
    check_given_once,
    check_port,
    check_ranges,
    check_reports,
    check_tls_files,
    policy_server_address,
    settings_field,
    whole_numbers,
)
from equipoise.cli.route_workers import report_settings, worker_settings
from equipoise.cli.validation import MAX_PORT
from equipoise.hal.errors import UsageError
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

_PORTS, _LIMITS, _TIMEOUTS = PickerPorts(), PickerLimits(), PickerTimeouts()
MAX_FALLBACKS = 8
MAX_BODY = 2046 * MIB
"""Bytes: gRPC counts those of a message in 31 bits, and 1 MiB of it is for all but the body."""


def _port(key: str, default: int, about: str) -> Option:
    return Option(key=key, kind=kinds.WHOLE, group=WHERE, metavar="PORT",
                  shown_default=str(default), help=about)  # fmt: skip


def _count(key: str, default: int, about: str) -> Option:
    return Option(key=key, kind=kinds.WHOLE, group=LIMITS, metavar="N",
                  shown_default=str(default), help=about)  # fmt: skip


OPTIONS = (
    Option(key="workers", kind=kinds.WORKERS, group=WORKERS, metavar="URL",
           shown_default=f"{REQUIRED}, or --endpoints-file, or --endpoints-name",
           help="endpoints, http://IP:PORT each; in a file also objects with url, name, slots, "
           "kv_tokens and headers, as of `equipoise route`"),
    Option(key="endpoints_file", kind=kinds.PATH, group=WORKERS, metavar="FILE",
           shown_default="none",
           help="YAML with `workers:`, which is read again when it changes"),
    Option(key="endpoints_name", kind=kinds.NAME, group=WORKERS, metavar="NAME",
           shown_default="none",
           help="a name in DNS, whose addresses are the endpoints, such as a headless service"),
    Option(key="endpoints_ports", kind=kinds.NAME, group=WORKERS, metavar="PORT,...",
           shown_default="8000",
           help="ports of each address of --endpoints-name, one for each data-parallel rank"),
    *(route.BY_KEY[key] for key in (
        "policy", "policy_options", "policy_server", "slots", "kv_tokens",
    )),
    replace(
        route.BY_KEY["metrics"],
        help="names of the Prometheus metrics by which workers report: generated=NAME is a counter "
        "of generated tokens, by which --tokens metrics counts; the others are for policies that "
        "need to know loads: waiting=NAME running=NAME, kv_usage=NAME or tokens=NAME, "
        "rank_label=LABEL, interval=SECONDS, timeout=SECONDS, path=/metrics",
    ),
    Option(key="tokens", kind=kinds.TOKEN_SOURCE, group=WORKERS, metavar="|".join(TokenSource),
           shown_default="metrics with --metrics generated=NAME, else chunks",
           help="where tokens of answers are known from: chunks that Envoy sends, a counter of the "
           "worker's metrics, or none"),
    Option(key="sheddable", kind=kinds.NAME, group=LIMITS, metavar="NAME,...",
           shown_default="none",
           help="objectives (x-gateway-inference-objective) whose requests are refused where they "
           "would have to wait (429)"),
    route.BY_KEY["host"],
    _port("port", _PORTS.grpc, "gRPC port for Envoy; 0 picks a free one"),
    _port("health_port", _PORTS.health, "port for gRPC health checks, without TLS"),
    _port("metrics_port", _PORTS.http, "port for /metrics, /ready, /health and /endpoints"),
    *(route.BY_KEY[key] for key in ("tls_cert", "tls_key")),
    *(route.BY_KEY[key] for key in ("max_body", "max_buffered", "max_queued")),
    _count("max_concurrency", _LIMITS.concurrency, "requests at once (429)"),
    _count("fallbacks", _LIMITS.fallbacks,
           "endpoints that an answer names after the first, for Envoy's retries"),
    route.BY_KEY["queue_timeout"],
    Option(key="drain_timeout", kind=kinds.SECONDS, group=WAITS, metavar="SECONDS",
           shown_default=f"{_TIMEOUTS.drain:g}",
           help="for requests under way, of an endpoint that left the list, and of the picker "
           "after a signal to end"),
    *(one for one in route.OPTIONS if one.group == HEALTH and one.key != "metrics"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


def _listed_from_yaml(value: object) -> object:
    return () if value == [] else kinds.WORKERS.from_yaml(value)


LISTED = replace(BY_KEY["workers"], kind=replace(kinds.WORKERS, from_yaml=_listed_from_yaml))
"""`workers` of an endpoints file, which may be empty for the time being."""


def picker(arguments: Namespace) -> int:
    """Serve until a signal ends it; 0, or 1 if requests were refused then.

    Raises UsageError before anything listens.
    """
    values = option_values(vars(arguments))
    settings = picker_settings(values)
    # Here, not above: what it imports is optional.
    from equipoise.serve.dependencies import require_picker

    require_picker()
    from equipoise.balancer.requests.policy_factory import routing_policy_factory
    from equipoise.serve.picker.server import serve_picker

    policy, options = policy_of(values, settings.tokens)
    return serve_picker(settings, routing_policy_factory(policy, options), print_stderr)


def option_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line asks for, its configuration file included."""
    file = read_config(arguments["config"], BY_KEY) if "config" in arguments else {}
    values = file | {key: value for key, value in arguments.items() if key in BY_KEY}
    check_given_once(values)
    return values


def policy_of(values: Mapping[str, Any], tokens: TokenSource) -> tuple[str, dict[str, object]]:
    """The name of the policy, and its options."""
    policy, options = values.get("policy", "fit"), dict(values.get("policy_options", ()))
    if policy in POLICIES and tokens is not TokenSource.CHUNKS:
        # Without chunks nobody says when a step is over: the policy would wait for it in vain.
        options.setdefault("lockstep", False)
    return policy, options


def picker_settings(values: Mapping[str, Any]) -> PickerSettings:
    """Raises UsageError naming the option, what it was and what it may be."""
    ranged = {
        key: value
        for key, value in values.items()
        if BY_KEY[key].group in (LIMITS, WAITS) and key != "sheddable"
    } | {
        key: value
        for key, value in values.items()
        if BY_KEY[key].group == HEALTH and key != "metrics"
    }
    check_ranges(ranged, BY_KEY)
    if ranged.get("fallbacks", 0) > MAX_FALLBACKS:
        raise UsageError(f"--fallbacks must be 0 to {MAX_FALLBACKS}, got {ranged['fallbacks']}")

    def of_group(group: str) -> dict[str, float]:
        chosen = {key: value for key, value in ranged.items() if BY_KEY[key].group == group}
        return {settings_field(key): value for key, value in chosen.items()}

    source = endpoint_source(values)
    reports = report_settings(dict(values.get("metrics", ())), _examples(source))
    counted = reports is not None and reports.generated is not None
    tokens = values.get("tokens", TokenSource.METRICS if counted else TokenSource.CHUNKS)
    if tokens is TokenSource.METRICS and not counted:
        raise UsageError("--tokens metrics needs --metrics generated=NAME: the counter to read")
    check_reports(values.get("policy", "fit"), reports)
    limits = PickerLimits(**whole_numbers(of_group(LIMITS)))
    if limits.body > MAX_BODY:
        most = f"{MAX_BODY // MIB}MiB, which fits a message of gRPC"
        raise UsageError(f"--max-body must be at most {most}, got {limits.body}")
    check_bodies(limits.body, limits.buffered)
    return PickerSettings(
        endpoints=source,
        ports=_ports(values),
        limits=limits,
        timeouts=PickerTimeouts(**of_group(WAITS)),
        health=HealthSettings(**of_group(HEALTH)),  # type: ignore[arg-type]  # as their kinds say
        reports=reports,
        policy_server=policy_server_address(values.get("policy_server")),
        sheddable=_names(values.get("sheddable")),
        tokens=tokens,
    )


def endpoint_source(values: Mapping[str, Any]) -> EndpointSource:
    """Where the endpoints are known from. Raises UsageError unless it is one place."""
    sources = [key for key in ("workers", "endpoints_file", "endpoints_name") if key in values]
    if len(sources) != 1:
        names = " and ".join(BY_KEY[key].name for key in sources) or "none"
        raise UsageError(
            f"one of --workers, --endpoints-file, --endpoints-name is needed, got {names}"
        )
    if "endpoints_ports" in values and sources != ["endpoints_name"]:
        raise UsageError("--endpoints-ports needs --endpoints-name")
    slots, kv_tokens = values.get("slots", 256), values.get("kv_tokens")
    match sources[0]:
        case "workers":
            return StaticEndpoints(workers=endpoints_of(values["workers"], slots, kv_tokens))
        case "endpoints_file":

            def read(path: Path) -> tuple[WorkerSettings, ...]:
                return read_endpoints(path, slots, kv_tokens)

            return EndpointsFile(path=values["endpoints_file"], read=read)
    _check_dns_name(values["endpoints_name"])
    # Slots and KV tokens are checked as those of a worker are.
    [example] = worker_settings(["http://127.0.0.1:8000"], slots, kv_tokens)
    return DnsEndpoints(
        name=values["endpoints_name"],
        ports=_port_list(values.get("endpoints_ports", "8000")),
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


def _ports(values: Mapping[str, Any]) -> PickerPorts:
    numbers = {
        "grpc": values.get("port", _PORTS.grpc),
        "health": values.get("health_port", _PORTS.health),
        "http": values.get("metrics_port", _PORTS.http),
    }
    for key, port in zip(("port", "health_port", "metrics_port"), numbers.values(), strict=True):
        check_port(BY_KEY[key], port)
    check_tls_files(values.get("tls_cert"), values.get("tls_key"))
    return PickerPorts(
        host=values.get("host", _PORTS.host),
        certificate=values.get("tls_cert"),
        private_key=values.get("tls_key"),
        **numbers,
    )
