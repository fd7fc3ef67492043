"""A process that has a policy, or a front end that shares it; does what its standard input says.

    python shared_policy_process.py serve NAME
    python shared_policy_process.py front_end NAME

Commands are JSON lists, one a line; so are answers.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    DispatchedRequest,
    FailureAction,
    RequestDispatcher,
)
from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.balancer.requests.policy_server import PolicyServer
from equipoise.balancer.requests.policy_socket import PolicySocket, connect_by_socket
from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.balancer.requests.request_router import RequestRouter

WORKERS, SLOTS = 2, 1


class FrontEnd:
    """Requests by name, and a dispatcher that has them."""

    def __init__(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.failures: list[str] = []
        self.requests: dict[str, DispatchedRequest] = {}
        policy = RemotePolicy(loop, lambda lost: self.dispatcher.fail_policy(lost))
        self.dispatcher = RequestDispatcher(policy, WORKERS, loop, self.failed)
        connect_by_socket(name, policy, self.dispatcher)

    def failed(self, error: Exception) -> FailureAction:
        self.failures.append(str(error))
        return FailureAction.STOP_POLICY

    def submit(self, name: str) -> None:
        self.requests[name] = DispatchedRequest(name, 5)
        self.dispatcher.submit(self.requests[name])

    def finish(self, name: str) -> None:
        request = self.requests[name]
        assert isinstance(request.status, BoundToWorker)
        self.dispatcher.start(request, request.status)
        self.dispatcher.finish(request)

    def status(self) -> Any:
        states = {name: type(one.status).__name__ for name, one in self.requests.items()}
        return [states, self.failures]


class Server:
    """A policy, and the socket that serves it."""

    def __init__(self, name: str) -> None:
        self.policy = routing_policy_factory("fit", {})([SLOTS] * WORKERS, [None] * WORKERS)
        loop = asyncio.get_running_loop()
        self.server = PolicyServer(
            self.policy, [str(number) for number in range(WORKERS)], loop, print
        )
        self.socket = PolicySocket(self.server, name)

    def status(self) -> Any:
        assert isinstance(self.policy, RequestRouter)
        return [len(self.server.sessions), self.policy.counts, self.policy.unassigned]

    def close(self) -> None:
        self.server.close()
        self.socket.close()


async def main(role: str, name: str) -> None:
    program = {"serve": Server, "front_end": FrontEnd}[role](name)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *arguments = json.loads(line)
        method: Callable[..., Any] = getattr(program, command)
        print(json.dumps(method(*arguments)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
