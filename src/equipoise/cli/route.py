"""`equipoise route`."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from equipoise.balancer.requests.rules import RULES
from equipoise.cli.config import read_config
from equipoise.cli.offline import warn
from equipoise.cli.route_metrics import reports_of
from equipoise.cli.route_options import BY_KEY, HEALTH, LIMITS, OPTIONS, WAITS, RouteRequest
from equipoise.cli.route_workers import workers_of
from equipoise.cli.streams import tell
from equipoise.cli.validation import MOST_PORT
from equipoise.hal.errors import UsageError
from equipoise.serve.settings import Access, HealthSettings, Limits, Patience, RouteSettings

MOST = 1 << 31
LONGEST = 7 * 86_400.0
"""Seconds: a week."""
FEWEST = {"max_body": 1 << 10, "max_header": 1 << 10}


def route(arguments: Namespace) -> int:
    """Serve until told to end; 0 if nothing was cut off then, 1 if something was.

    Raises UsageError before anything listens.
    """
    request = request_of(vars(arguments))
    settings = settings_of(request)
    # Here, not above: what it imports is optional.
    from equipoise.serve.needs import require

    require()
    from equipoise.balancer.requests.factory import factory_of
    from equipoise.serve.access import open_to_all
    from equipoise.serve.serving import serve

    factory = factory_of(request.policy, dict(request.policy_options))
    if open_to_all(settings.access):
        warn(f"--host {settings.access.host}: anybody who reaches it may ask: no --api-key-file")
    return serve(settings, factory, tell)


def request_of(given: Mapping[str, Any]) -> RouteRequest:
    """What the command line asks for, its configuration file included."""
    file = read_config(given["config"], BY_KEY) if "config" in given else {}
    named = {key: value for key, value in given.items() if key in BY_KEY}
    values = file | named
    own = {field.name for field in fields(RouteRequest)}
    others = {key: values.pop(key) for key in set(values) - own}
    for key in ("workers", "policy_options", "metrics"):
        if key in values:
            values[key] = tuple(values[key])
    return RouteRequest(**values, others=others)


def settings_of(request: RouteRequest) -> RouteSettings:
    """Raises UsageError naming the option, what it was and what it may be."""
    _check(request.others)
    if not 0 <= request.port <= MOST_PORT:
        raise UsageError(f"--port must be 0 to {MOST_PORT}, got {request.port}")
    if request.tls_key is not None and request.tls_cert is None:
        raise UsageError("--tls-key needs --tls-cert")
    by_group = {
        group: {_field(o.key): request.others[o.key] for o in OPTIONS
                if o.group == group and o.key in request.others}
        for group in (LIMITS, WAITS, HEALTH)
    }  # fmt: skip
    workers = workers_of(request.workers, request.slots, request.room)
    reports = reports_of(dict(request.metrics), workers)
    if reports is None and request.policy in RULES and RULES[request.policy].report_every:
        # It would go on by its own picks, which count for ever: a worker that comes back has none.
        raise UsageError(
            f"--policy {request.policy} decides by reports of workers: --metrics is needed"
        )
    return RouteSettings(
        workers=workers,
        reports=reports,
        access=_access(request),
        limits=Limits(**_whole(by_group[LIMITS])),
        patience=Patience(**by_group[WAITS]),
        health=HealthSettings(**by_group[HEALTH]),  # type: ignore[arg-type]  # as their kinds say
        client_rank=request.client_rank,
        log=request.log,
        wandb=request.wandb,
    )


def _field(key: str) -> str:
    return key.removeprefix("max_").removeprefix("health_").removesuffix("_timeout")


def _whole(values: Mapping[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in values.items()}


def _check(others: Mapping[str, float]) -> None:
    for key, value in others.items():
        option = BY_KEY[key]
        least = FEWEST.get(key, 0 if key in ("max_held", "drain_timeout") else 1)
        if option.group == WAITS or key.startswith("health_"):
            if not 0 <= value <= LONGEST or (not value and key != "drain_timeout"):
                raise UsageError(
                    f"{option.name} must be above 0, up to {LONGEST:g} seconds, got {value:g}"
                )
        elif not least <= value <= (1 << 60 if option.group == LIMITS else MOST):
            raise UsageError(f"{option.name} must be at least {least}, got {value}")


def _access(request: RouteRequest) -> Access:
    path, own = request.worker_key_file, request.api_key_file
    theirs = () if path is None else keys_of("--worker-key-file", path)
    if len(theirs) > 1:
        raise UsageError(f"--worker-key-file: {path} has more than one key")
    return Access(
        host=request.host,
        port=request.port,
        keys=() if own is None else keys_of("--api-key-file", own),
        worker_key=theirs[0] if theirs else None,
        certificate=request.tls_cert,
        private_key=request.tls_key,
    )


def keys_of(flag: str, path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line, at least one. Raises UsageError that names the flag."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag}: {path} is not UTF-8") from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        # Nobody who names a file of keys means that everybody may ask.
        raise UsageError(f"{flag}: {path} has no key in it")
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"{flag}: {path} has a key that no header can carry")
    return keys
