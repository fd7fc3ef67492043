"""One process on the machine where this is: a server of a node, or the proxy."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
GUARD_TIMEOUT = 60.0
TAIL_BYTES, TAIL_LINES = 4096, 8


class Server:
    """A command under a guard; on other nodes Ray makes an actor of it.

    Attributes:
        code: the command's exit code, as `status` found it; None: there is none.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._keeps_port = False
        self._log: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._status: str | None = None
        self.code: int | None = None

    def hold(self, port: int) -> int:
        """Keep a port for it until `start`; 0: a free one, kept until it is told to end.

        A model takes minutes to load before its server binds the port, and by then the system may
        have given a free one to somebody else. Returns the port. Raises OSError where it is taken.
        """
        self._keeps_port = not port
        # What is held so, and not listened on, can be bound by a server that says the same, as
        # those of asyncio, uvicorn, Go and Rust do.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("", port))
        except OSError as error:
            raise OSError(f"port {port} cannot be had: {error.strerror}") from error
        return int(self._socket.getsockname()[1])

    def start(self, command: Sequence[str], log: str, grace: float) -> None:
        """Run the command.

        Args:
            command: a program and its arguments.
            log: file to whose end it writes; empty: it writes to our standard error.
            grace: seconds from being told to end to being killed.
        """
        if log:
            self._log = Path(log)
            self._log.parent.mkdir(parents=True, exist_ok=True)
        if not self._keeps_port:
            self._socket.close()
        self._guard = subprocess.Popen(
            [sys.executable, str(GUARD), log, str(grace), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a ctrl-C in the terminal is for the launcher only
        )

    def status(self, seconds: float = 0.0) -> str | None:
        """How it ended, in words, once it has, waited for so long; None: it runs."""
        if self._guard is None or self._guard.stdout is None:
            return "it was not started"
        if self._status is not None:
            return self._status
        if select.select([self._guard.stdout], [], [], seconds)[0]:
            last_line = self._guard.stdout.read().decode().strip()
            self._status, self.code = (
                _ending(last_line),
                int(last_line) if last_line.isdigit() else None,
            )
            self._guard.stdout.close()
            self._guard.wait(GUARD_TIMEOUT)
        return self._status

    def tail(self) -> str:
        """The last lines that it wrote."""
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, os.path.getsize(self._log) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {error}"
        return "\n".join(lines[-TAIL_LINES:])

    def tell(self) -> None:
        """Tell it to end, and do not wait; again is no harm."""
        self._socket.close()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()


def _ending(last_line: str) -> str:
    """Of a guard's last line: the command's return code, or words."""
    if not last_line:
        return "its guard was killed"
    if last_line.startswith("-"):
        return f"it was ended by signal {last_line[1:]}"
    return f"it ended with exit code {last_line}" if last_line.isdigit() else last_line
