"""`equipoise policy-server`: its options, and the settings that it runs with."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.cli import kinds, route
from equipoise.cli.config import read_config
from equipoise.cli.offline import warn
from equipoise.cli.option import Option
from equipoise.cli.process import print_stderr
from equipoise.cli.route import WHERE, check_given_once, check_port
from equipoise.hal.errors import UsageError

DEFAULT_PORT, DEFAULT_METRICS_PORT = 9004, 9005
OPTIONS = (
    route.BY_KEY["policy"],
    replace(route.BY_KEY["policy_options"],
            help="how the policy is set, such as lockstep=false; a mapping in a file"),
    route.BY_KEY["host"],
    Option(key="port", kind=kinds.WHOLE, group=WHERE, metavar="PORT",
           shown_default=str(DEFAULT_PORT), help="port for front ends; 0 picks a free one"),
    Option(key="metrics_port", kind=kinds.WHOLE, group=WHERE, metavar="PORT",
           shown_default=str(DEFAULT_METRICS_PORT),
           help="port for /metrics, /ready, /health and /workers"),
)  # fmt: skip
RESERVED_OPTIONS = ("front_ends", "front_end")
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


def policy_server(arguments: Namespace) -> int:
    """Serve until a signal ends it; returns 0. Raises UsageError before anything listens."""
    given = vars(arguments)
    file = read_config(given["config"], BY_KEY) if "config" in given else {}
    values: dict[str, Any] = file | {key: value for key, value in given.items() if key in BY_KEY}
    check_given_once(values)
    ports = {"port": DEFAULT_PORT, "metrics_port": DEFAULT_METRICS_PORT}
    for key in ports:
        ports[key] = values.get(key, ports[key])
        check_port(BY_KEY[key], ports[key])
    # Here, not above: what it imports is optional.
    from equipoise.serve.dependencies import require

    require()
    from equipoise.balancer.requests.policy_factory import routing_policy_factory
    from equipoise.serve.policy_process import PolicyServerSettings, serve_policy

    name, options = values.get("policy", "fit"), dict(values.get("policy_options", ()))
    for option in RESERVED_OPTIONS:
        if option in options:
            raise UsageError(f"--policy-options: {option} has no effect here: all front ends share")
    factory = routing_policy_factory(name, options)
    if name in POLICIES and POLICIES[name].report_interval:
        warn(f"--policy {name} decides by reports of workers: each front end needs --metrics")
    settings = PolicyServerSettings(host=values.get("host", "127.0.0.1"), **ports)
    return serve_policy(settings, factory, print_stderr)
