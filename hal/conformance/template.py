"""The process that rank processes are copies of, as their driver sees it."""

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

from equipoise.hal.conformance.forking import FORK, PID, REQUEST, RUNNING, WAIT, Verb
from equipoise.hal.errors import Violation

ANSWER = 60.0
"""Seconds that the template may take to answer, by default."""
POLL = 0.005
"""Seconds between two looks at whether a copy has ended."""
# torch's store looks up the name of every peer; where a name server drops datagrams now and then,
# each drop would cost 5 s. Over TCP none is lost. Read at a process's first look-up, so the driver
# sets it for itself too, where nobody has chosen otherwise.
os.environ.setdefault("RES_OPTIONS", "use-vc")


class Template:
    """A spawned interpreter that imports a module once, and is then copied for every rank.

    Importing torch takes a second of processor time, a copy some milliseconds. It imports what its
    driver imports, and nothing that happens to lie in the working directory.

    Args:
        command: name of the module, whose `main` a copy runs, then its arguments.
        patience: seconds that it may take to answer; before its first answer it imports the module.
    """

    def __init__(self, command: Sequence[str], patience: float = ANSWER) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(patience)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "equipoise.hal.conformance.forking", *command],
                stdin=theirs.fileno(),
                stdout=self._errors,
                stderr=self._errors,
                env={
                    **os.environ,
                    **threads,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def runs(self) -> bool:
        """Whether it can be copied."""
        return self._process.poll() is None

    def copy(self, stdin: int, stdout: int, stderr: int) -> "Copy":
        """A process that runs the module's `main` with these descriptors.

        Raises `Violation` of E1 when the template has ended.
        """
        return Copy(self, self._ask(FORK, 0, [stdin, stdout, stderr]))

    def ended(self, pid: int) -> int | None:
        """The exit status of a copy, negative for a signal; None while it runs. Told once."""
        try:
            status = self._ask(WAIT, pid)
        except Violation:
            return -signal.SIGKILL  # copies end with their template
        return None if status == RUNNING else status

    def close(self) -> None:
        """End it; copies that still run end with it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _ask(self, verb: Verb, pid: int, descriptors: Sequence[int] = ()) -> int:
        try:
            socket.send_fds(self._socket, [REQUEST.pack(verb, pid)], descriptors)
            (answer,) = PID.unpack(self._socket.recv(PID.size))
        except (OSError, struct.error) as error:
            self._process.kill()
            self._process.wait()
            raise Violation("E1", f"no rank can be started:\n{self._complaints()}") from error
        return int(answer)

    def _complaints(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")


class Copy:
    """One process that was copied; its process id is its own until it was waited for."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template = template
        self._status: int | None = None
        self.pid = pid

    def signal(self, number: int) -> None:
        """Send it a signal, unless it was found to have ended."""
        if self._status is None:
            with suppress(ProcessLookupError):  # the template has ended, and so has its copy
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Its exit status, negative for a signal; None when it still runs after so long."""
        expiry = time.monotonic() + seconds
        while self._status is None:
            self._status = self._template.ended(self.pid)
            if self._status is None and time.monotonic() >= expiry:
                return None
            if self._status is None:
                time.sleep(POLL)
        return self._status
