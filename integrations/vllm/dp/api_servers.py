"""Lets the API servers of one engine share a policy: the first has it, the others connect to it.

`vllm serve` starts all API servers of an engine on one machine, so a Unix socket reaches them. Its
name comes from the address at which the coordinator publishes what the ranks report, which all of
them have and nobody else, and from the ranks that they route to: with `--data-parallel-hybrid-lb`
the API servers of each node have a policy for the ranks of that node.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from equipoise.balancer.requests.dispatcher import Clock, RequestDispatcher
from equipoise.balancer.requests.policy import RoutingPolicy
from equipoise.balancer.requests.policy_server import PolicyServer
from equipoise.balancer.requests.policy_socket import PolicySocket, connect_by_socket
from equipoise.balancer.requests.remote_policy import RemotePolicy, connect_in_process
from equipoise.hal.errors import IntegrationError, PolicyError
from equipoise.integrations.vllm.dp.metrics import RoutingMetrics

LOG = logging.getLogger("vllm.equipoise")
OTHERWISE = "or set --api-server-count 1"


class ServedPolicy:
    """The policy that API server 0 has for all.

    Attributes:
        server: decides for all front ends.
    """

    def __init__(self, policy: RoutingPolicy, workers: int, clock: Clock, name: str) -> None:
        names = [str(rank) for rank in range(workers)]
        self.server = PolicyServer(
            policy, names, clock, self._failed, RoutingMetrics().set_api_servers
        )
        self._socket = PolicySocket(self.server, name)

    def close(self) -> None:
        """Stop; at the end of the client or of the process."""
        self.server.close()
        self._socket.close()

    def _failed(self, error: Exception) -> None:
        LOG.error("equipoise: the policy of all API servers failed", exc_info=error)


def share_policy(
    client: Any,
    policy: RemotePolicy,
    dispatcher: RequestDispatcher,
    make_policy: Callable[[], RoutingPolicy],
) -> ServedPolicy | None:
    """Connect one of several API servers to the policy, which the first of them creates.

    Args:
        client: vLLM's client, in whose event loop this is called.
        policy: of `dispatcher`; not connected yet.
        dispatcher: of the client's requests.
        make_policy: creates the policy.

    Returns:
        What the first API server has to close.

    Raises:
        IntegrationError: they cannot share one; says what to set.
    """
    name = policy_name(client)
    workers = len(client.core_engines)
    try:
        if client.client_index > 0:
            connect_by_socket(name, policy, dispatcher)
            return None
        served = ServedPolicy(make_policy(), workers, dispatcher.clock, name)
        connect_in_process(served.server, policy, dispatcher, dispatcher.clock)
        return served
    except PolicyError as error:
        raise IntegrationError(
            f"equipoise: API servers cannot share a policy: {error}, {OTHERWISE}"
        ) from error


def policy_name(client: Any) -> str:
    """Return what the API servers of one engine have in common, and those of others do not.

    Raises `IntegrationError` where they have nothing, or there is no event loop to serve them in.
    """
    address, ranks = client.stats_update_address, client.engine_ranks_managed
    problem = None
    if not address:
        problem = "without a coordinator they have nothing in common: start them by `vllm serve`"
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        problem = "no event loop runs while the client is created: start them by `vllm serve`"
    if problem is not None:
        raise IntegrationError(
            f"equipoise: API servers cannot share a policy: {problem}, {OTHERWISE}"
        )
    return f"vllm {address} {ranks[0]} {ranks[-1]}"
