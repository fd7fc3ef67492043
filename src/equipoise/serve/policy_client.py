"""Has a front end decided for by a policy server while there is one, and by its own policy else."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from enum import Enum, unique

from equipoise.balancer.requests.dispatcher import RequestDispatcher
from equipoise.balancer.requests.policy import RoutingPolicy
from equipoise.balancer.requests.policy_factory import PolicyFactory
from equipoise.balancer.requests.policy_messages import SharedPolicyLost
from equipoise.balancer.requests.policy_socket import JsonLinesLink
from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.balancer.requests.request_router import RequestRouter
from equipoise.hal.errors import UsageError
from equipoise.serve.settings import PolicyServerAddress

LOG = logging.getLogger("equipoise.route")
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""Requests wait as long for a server that hangs, before this front end decides alone."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 5.0
"""Between two attempts to join: after the first that fails or a server that was lost, and after
many that failed."""


@unique
class Membership(Enum):
    """Who decides."""

    ALONE = "alone"
    """A policy of this front end; it tries to join."""
    JOINED = "joined"
    """The policy of the server."""


def check_policy_takes_over(factory: PolicyFactory) -> None:
    """Raises UsageError unless a policy of this factory can take the place of another one."""
    method = getattr(type(factory([1], [None])), "on_running", None)
    # What derives from the protocol has a method that does nothing.
    if method is None or method is RoutingPolicy.on_running:
        raise UsageError(
            "--policy: with a policy server it needs a method `on_running`: requests run "
            "when it takes over"
        )


class PolicyClient:
    """Joins a policy server, again and again; to be created in an event loop.

    Where the server is lost, the dispatcher gets a policy of its own, with what waits and what
    runs; where it is there again, the server is told the same.

    Args:
        dispatcher: of this front end's requests; it has a policy of its own at first.
        address: of the server.
        make_policy: makes a policy for the dispatcher's workers.

    Attributes:
        membership: who decides.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        address: PolicyServerAddress,
        make_policy: Callable[[], RoutingPolicy],
    ) -> None:
        self.membership = Membership.ALONE
        self._dispatcher, self._address, self._make_policy = dispatcher, address, make_policy
        own = dispatcher.policy
        self._lockstep = own.settings.lockstep if isinstance(own, RequestRouter) else None
        self._loop = asyncio.get_running_loop()
        self._last_reason = ""

    async def run(self) -> None:
        """Until it is cancelled."""
        delay = RETRY_SECONDS
        while True:
            if await self._join():
                delay = RETRY_SECONDS
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)

    async def _join(self) -> bool:
        """One attempt, and what follows until the server is lost; whether it decided."""
        lost: asyncio.Future[bool] = self._loop.create_future()

        def on_lost(error: SharedPolicyLost) -> None:
            if lost.done():  # `run` is cancelled in this turn of the loop
                return
            lost.set_result(self.membership is Membership.JOINED)
            self._lose(error.reason)

        policy = RemotePolicy(
            self._loop,
            on_lost,
            lambda: self._joined(policy),
            ANSWER_SECONDS,
            ANSWER_SECONDS,
            self._lockstep,
        )
        link = JsonLinesLink(policy.receive, lambda: policy.lose(link.end))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._loop.create_connection(
                    lambda: link, self._address.host, self._address.port
                )
        except TimeoutError:
            self._log_once(f"no connection in {CONNECT_SECONDS:g} seconds")
            return False
        except OSError as error:
            self._log_once(_reason(error))
            return False
        policy.connect(link, self._dispatcher)
        try:
            return await lost
        finally:
            self._decide_alone()
            policy.close()

    def _joined(self, policy: RemotePolicy) -> None:
        self.membership, self._last_reason = Membership.JOINED, ""
        self._dispatcher.replace_policy(policy)
        LOG.warning("the policy server at %s decides from now on", self._address)

    def _lose(self, why: str) -> None:
        self._decide_alone()
        self._log_once(why)

    def _decide_alone(self) -> None:
        if self.membership is Membership.JOINED:
            self.membership = Membership.ALONE
            self._dispatcher.replace_policy(self._make_policy())

    def _log_once(self, why: str) -> None:
        """Once for each reason: it tries every second."""
        if why != self._last_reason:
            self._last_reason = why
            LOG.warning(
                "no decisions from the policy server at %s (%s): this front end decides alone, and "
                "tries to join",
                self._address,
                why,
            )


def _reason(error: OSError) -> str:
    """Without the address, which asyncio's own text of a refused connection repeats."""
    if error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)
