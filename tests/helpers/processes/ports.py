"""Ports that nobody serves on."""

import socket
from contextlib import ExitStack
from random import SystemRandom

LOWEST, HIGHEST = 15_000, 30_000
"""Below those that a system gives to whoever asks for any: no connection takes one meanwhile."""
ATTEMPTS = 200


def free_port(following: int = 1) -> int:
    """The first of so many that follow each other, on the loopback address."""
    draw = SystemRandom()
    for _ in range(ATTEMPTS):
        port = draw.randrange(LOWEST, HIGHEST - following)
        with ExitStack() as sockets:
            try:
                for each in range(port, port + following):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", each))
            except OSError:
                continue
            return port
    raise AssertionError(f"no {following} ports follow each other")
