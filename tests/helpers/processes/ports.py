"""Ports that nobody serves on."""

import socket
from contextlib import ExitStack


def free_port(following: int = 1) -> int:
    """The first of so many that follow each other, on the loopback address."""
    for _ in range(50):
        with ExitStack() as held:
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                for later in range(1, following):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port + later))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError(f"no {following} ports follow each other")
