"""`equipoise policy-server`: its options, and the settings that it runs with."""

from dataclasses import dataclass
from typing import Annotated

from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.cli.command import Command
from equipoise.cli.offline import warn
from equipoise.cli.option_checks import MAX_PORT
from equipoise.cli.process import print_stderr
from equipoise.cli.route import WHERE, PolicyRequest, check_given_once
from equipoise.hal.errors import UsageError
from equipoise.hal.support.working_directory import search_working_directory
from equipoise.option import Option

POLICY_SERVER = """\
Decides for several proxies or pickers in front of the same workers, as one would: start
each of them with --policy-server. While it is away they decide by their own
policies. Needs the extra `serve`: pip install '.[serve]' in a clone."""
EXAMPLES = """\
examples:
  equipoise policy-server
  equipoise route --workers http://10.0.0.1:8000 http://10.0.0.2:8000 --policy-server 127.0.0.1:9004
  equipoise policy-server --host 0.0.0.0 --policy-options lockstep=false

exit code: 0 ended by a signal, 2 bad input, 3 the policy failed"""
RESERVED_OPTIONS = ("front_ends", "front_end")


@dataclass(frozen=True, kw_only=True)
class PolicyServerRequest(PolicyRequest):
    """What one `equipoise policy-server` was asked for."""

    # fmt: off
    port: Annotated[int, Option(
        "port for front ends; 0 picks a free one", WHERE, least=0, most=MAX_PORT, metavar="PORT"
    )] = 9004
    metrics_port: Annotated[int, Option(
        "port for /metrics, /ready, /health and /workers", WHERE,
        least=0, most=MAX_PORT, metavar="PORT")] = 9005
    # fmt: on


def policy_server(request: PolicyServerRequest, command: str) -> int:
    """Serve until a signal ends it; returns 0. Raises UsageError before anything listens."""
    check_given_once(request)
    # Here, not above: what it imports is optional.
    from equipoise.serve.dependencies import require

    require()
    from equipoise.balancer.requests.policy_factory import routing_policy_factory
    from equipoise.serve.policy_process import PolicyServerSettings, serve_policy

    name, options = request.policy, dict(request.policy_options)
    for option in RESERVED_OPTIONS:
        if option in options:
            raise UsageError(f"--policy-options: {option} has no effect here: all front ends share")
    search_working_directory()
    factory = routing_policy_factory(name, options)
    if name in POLICIES and POLICIES[name].report_interval:
        warn(f"--policy {name} decides by reports of workers: each front end needs --metrics")
    settings = PolicyServerSettings(
        host=request.host, port=request.port, metrics_port=request.metrics_port
    )
    return serve_policy(settings, factory, print_stderr)


COMMAND = Command(PolicyServerRequest, policy_server, description=POLICY_SERVER, examples=EXAMPLES)
