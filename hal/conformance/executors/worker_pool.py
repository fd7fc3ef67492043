"""Rank processes as their driver sees them: forked from one server, replaced when broken.

Each is forked when it is first needed and serves every later case.
"""

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from equipoise.hal.conformance.executors.fork_server import (
    FORK,
    PID,
    REQUEST,
    RUNNING,
    WAIT,
    RequestKind,
)
from equipoise.hal.errors import Violation

START_TIMEOUT = 60.0
"""Seconds that the server may take to answer: importing torch is slow on a busy machine."""
EXIT_POLL_INTERVAL = 0.005
"""Seconds between two polls of whether a fork has ended; the server cannot notify."""
# torch's store looks up the name of every peer; where a name server drops datagrams, a drop costs
# 5 s. Over TCP none is lost. A process reads the variable at its first look-up, so the driver sets
# it for itself too, unless the user has set it.
os.environ.setdefault("RES_OPTIONS", "use-vc")


class ForkServer:
    """A spawned interpreter that imports a module once, and is then forked for every rank.

    Importing torch takes a second of processor time, a fork some milliseconds. The interpreter uses
    the `sys.path` of its driver, without the working directory.

    Args:
        command: name of the module whose `main` a fork runs, then its arguments.
        timeout: seconds that it may take to answer; before its first answer it imports the module.
    """

    def __init__(self, command: Sequence[str], timeout: float = START_TIMEOUT) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._socket, child_end = socket.socketpair()
        self._socket.settimeout(timeout)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with child_end:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "equipoise.hal.conformance.executors.fork_server",
                    *command,
                ],
                stdin=child_end.fileno(),
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

    def is_alive(self) -> bool:
        """Whether it can be forked."""
        return self._process.poll() is None

    def fork(self, stdin: int, stdout: int, stderr: int) -> "ForkedProcess":
        """Fork a process that runs the module's `main` with these descriptors.

        Raises `Violation` of E1 when the server has ended.
        """
        return ForkedProcess(self, self._ask(FORK, 0, [stdin, stdout, stderr]))

    def poll(self, pid: int) -> int | None:
        """The exit status of a fork, negative for a signal; None while it runs. Returned once."""
        try:
            status = self._ask(WAIT, pid)
        except Violation:
            return -signal.SIGKILL  # forks end with their server
        return None if status == RUNNING else status

    def close(self) -> None:
        """End it; forks that still run end with it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _ask(self, kind: RequestKind, pid: int, descriptors: Sequence[int] = ()) -> int:
        try:
            socket.send_fds(self._socket, [REQUEST.pack(kind, pid)], descriptors)
            (answer,) = PID.unpack(self._socket.recv(PID.size))
        except (OSError, struct.error) as error:
            self._process.kill()
            self._process.wait()
            raise Violation("E1", f"no rank can be started:\n{self._complaints()}") from error
        return int(answer)

    def _complaints(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")


class ForkedProcess:
    """A forked process; its id is not reused before it was waited for."""

    def __init__(self, template: ForkServer, pid: int) -> None:
        self._template = template
        self._status: int | None = None
        self.pid = pid

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it was found to have ended."""
        if self._status is None:
            with suppress(ProcessLookupError):  # the server has ended, and so has its fork
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Its exit status, negative for a signal; None when it still runs after the timeout."""
        expiry = time.monotonic() + seconds
        while self._status is None:
            self._status = self._template.poll(self.pid)
            if self._status is None and time.monotonic() >= expiry:
                return None
            if self._status is None:
                time.sleep(EXIT_POLL_INTERVAL)
        return self._status


STDERR_TAIL_BYTES = 4000
"""Bytes of a rank's standard error that a failure quotes."""
READ_BYTES = 1 << 16
EXIT_TIMEOUT = 10.0
"""Seconds that a process which has closed its pipe, or was killed, may take to end."""
STACK_DUMP_TIMEOUT = 2.0
"""Seconds that a process gets to write the stacks of its threads."""


class WorkerProcess:
    """A fork of the server that runs a module which calls `worker_process.serve_requests`."""

    def __init__(self, template: ForkServer) -> None:
        self._unparsed_reply = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        child_end, self._orders = os.pipe()
        self._answers, replies = os.pipe()
        try:
            self._process = template.fork(child_end, replies, self._errors.fileno())
        except BaseException:
            self._close()
            raise
        finally:
            # While a copy of `replies` is open here, the end of the rank is no end of the pipe.
            os.close(child_end)
            os.close(replies)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def reply_fd(self) -> int:
        """The descriptor that the rank's answers are read from."""
        return self._answers

    def send(self, line: dict[str, Any]) -> None:
        """Send one line; that a rank is already dead shows when its answer is read."""
        unsent_bytes = json.dumps(line).encode() + b"\n"
        try:
            while unsent_bytes:
                unsent_bytes = unsent_bytes[os.write(self._orders, unsent_bytes) :]
        except BrokenPipeError:
            return

    def receive(self) -> dict[str, Any] | None:
        """Read once; returns a whole answer or None. Raises `EOFError` when the rank has ended."""
        part = os.read(self._answers, READ_BYTES)
        if not part:
            raise EOFError
        self._unparsed_reply += part
        line, newline, remainder = self._unparsed_reply.partition(b"\n")
        if not newline:
            return None
        self._unparsed_reply = remainder
        answer: dict[str, Any] = json.loads(line)
        return answer

    def exit_reason(self) -> str:
        """Why it ended, as text; waits for the end, at most `EXIT_TIMEOUT`."""
        code = self._process.wait(EXIT_TIMEOUT)
        if code is None:
            return "has closed its pipe, and does not end"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def dump_stacks(self) -> None:
        """End it by a signal at which it writes the stacks of its threads."""
        # A stopped process handles SIGABRT only once it continues.
        self._process.send_signal(signal.SIGABRT)
        self._process.send_signal(signal.SIGCONT)
        self._process.wait(STACK_DUMP_TIMEOUT)

    def stderr_tail(self) -> str:
        """The end of its standard error."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - STDERR_TAIL_BYTES))
        return self._errors.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill it, stopped or not, and release its descriptors."""
        self._process.send_signal(signal.SIGKILL)
        try:
            self._process.wait(EXIT_TIMEOUT)
        finally:
            self._close()

    def _close(self) -> None:
        os.close(self._orders)
        os.close(self._answers)
        self._errors.close()


OnRankExit = Callable[[int, str], None]
"""Called at once with the rank that has ended, and how it ended."""


class WorkerPool:
    """Rank processes, by rank. Not thread-safe.

    Args:
        command: a module that calls `worker_process.serve_requests`, and its arguments.
        timeout: seconds that importing the module may take.
    """

    def __init__(self, command: Sequence[str], timeout: float = START_TIMEOUT) -> None:
        self._command = tuple(command)
        self._timeout = timeout
        self._fork_server: ForkServer | None = None
        self.workers: dict[int, WorkerProcess] = {}

    def start(self, ranks: Collection[int]) -> None:
        """Start those of `ranks` that do not run. Raises `Violation` of E1."""
        for rank in ranks:
            if rank not in self.workers:
                self.workers[rank] = self.start_worker()

    def start_worker(self) -> WorkerProcess:
        """Start a process that is no rank; the caller ends it. Raises `Violation` of E1."""
        if self._fork_server is None or not self._fork_server.is_alive():
            self._close_fork_server()
            self._fork_server = ForkServer(self._command, self._timeout)
        return WorkerProcess(self._fork_server)

    def send(self, orders: Mapping[int, dict[str, Any]]) -> None:
        """Send each rank its line."""
        for rank, line in orders.items():
            self.workers[rank].send(line)

    def gather(
        self, ranks: Collection[int], lost: Collection[int], watchdog: float, mourn: OnRankExit
    ) -> dict[int, dict[str, Any]]:
        """One answer of each of `ranks`; those in `lost` are expected to end and are not awaited.

        Raises:
            Violation: of E1, when another rank ends; of C8, when one does not answer within
                `watchdog` seconds: it quotes the stacks. No process is left then.
        """
        expiry = time.monotonic() + watchdog
        answers: dict[int, dict[str, Any]] = {}
        waiting = set(ranks) - set(lost)
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self.workers[rank].reply_fd, selectors.EVENT_READ, rank)
            while waiting:
                ready = selector.select(max(0.0, expiry - time.monotonic()))
                if not ready:
                    raise self._timeout_violation(waiting, watchdog, answers)
                for key, _ in ready:
                    try:
                        answer = self.workers[key.data].receive()
                    except EOFError:
                        selector.unregister(key.fd)
                        self._on_exit(key.data, lost, mourn)
                        continue
                    if answer is not None:
                        answers[key.data] = answer
                        waiting.discard(key.data)
        return answers

    def kill(self, ranks: Collection[int]) -> None:
        """Kill these; `start` replaces them."""
        for rank in ranks:
            self.workers.pop(rank).kill()

    def close(self) -> None:
        """End every process."""
        self._kill_all()
        self._close_fork_server()

    def _kill_all(self) -> None:
        self.kill(list(self.workers))

    def _close_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def _on_exit(self, rank: int, lost_ranks: Collection[int], mourn: OnRankExit) -> None:
        how = self.workers[rank].exit_reason()
        mourn(rank, how)
        if rank not in lost_ranks:
            complaints = self.workers[rank].stderr_tail()  # first: killing closes its file
            self._kill_all()
            raise Violation("E1", f"rank {rank} {how}\n{complaints}")

    def _timeout_violation(
        self, waiting: Collection[int], watchdog: float, answers: Mapping[int, dict[str, Any]]
    ) -> Violation:
        """Which ranks do not answer, with their stacks, and the errors of those that do."""
        for rank in waiting:
            self.workers[rank].dump_stacks()
        quotes = [f"rank {r}:\n{self.workers[r].stderr_tail()}" for r in sorted(waiting)]
        faults = {rank: reply["fault"] for rank, reply in answers.items() if "fault" in reply}
        quotes += [f"rank {rank} answered: {fault[-1]}" for rank, fault in sorted(faults.items())]
        self._kill_all()
        return Violation("C8", f"no answer within {watchdog:g} s from\n" + "\n".join(quotes))
