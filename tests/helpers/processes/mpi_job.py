"""Ranks that mpiexec starts, for tests: one job runs many cases, because its start costs seconds.

A case is a function `program(fabric, **arguments)` of an importable module, as for `Ranks`; it runs
on every rank of the job, each time over a store and a fabric of its own.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from helpers.watchdog import WATCHDOG

MPIEXEC = Path(sys.executable).with_name("mpiexec")
DEADLINE = 20.0
"""Seconds that any wait within a case may last, unless the case says otherwise."""


class Job:
    """A running job. Not for several threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._links: dict[int, IO[str]] = {}
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            where = str(Path(folder, "driver"))
            listener.bind(where)
            listener.listen(size)
            listener.settimeout(WATCHDOG)
            self.process = self._start(where)
            for _ in range(size):
                self._meet(listener)

    def run(
        self, program: Callable[..., Any], /, *, deadline: float = DEADLINE, **arguments: Any
    ) -> list[Any]:
        """Results of `program(fabric, **arguments)` by rank; a rank's error fails the test."""
        case = f"{program.__module__}:{program.__qualname__}"
        answers = self._ask({"case": case, "deadline": deadline, "arguments": arguments})
        self._ask({"close": True})
        return answers

    def order(self, line: dict[str, Any]) -> None:
        """Send a line to every rank."""
        for link in self._links.values():
            link.write(json.dumps(line) + "\n")
            link.flush()

    def hear(self, rank: int) -> dict[str, Any]:
        """The rank's next answer; fails when there is none in time, or none any more."""
        try:
            line = self._links[rank].readline()
        except TimeoutError:
            line = ""
        if not line:
            code = self.end()
            raise AssertionError(f"rank {rank} fell silent (job: {code})\n{self.said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> int:
        """Let the ranks end, and return the job's exit code; its output is in `said` then."""
        for link in self._links.values():
            link.close()
        try:
            code = self.process.wait(WATCHDOG)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        if not self._output.closed:
            self._output.seek(0)
            self.said = self._output.read().decode(errors="replace")
            self._output.close()
        return code

    def _start(self, where: str) -> subprocess.Popen[bytes]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = os.pathsep.join(filter(None, sys.path))
        rank = [sys.executable, "-P", "-m", "helpers.processes.mpi_job_rank", where]
        return subprocess.Popen(
            [str(MPIEXEC), "-n", str(self.size), *rank],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, **threads, "PYTHONPATH": paths},
            start_new_session=True,
        )

    def _meet(self, listener: socket.socket) -> None:
        link, _ = listener.accept()
        with link:  # which really closes when its file does
            link.settimeout(WATCHDOG)
            words = link.makefile("rw", encoding="utf-8")
        self._links[json.loads(words.readline())["rank"]] = words

    def _ask(self, line: dict[str, Any]) -> list[Any]:
        self.order(line)
        answers = [self.hear(rank) for rank in range(self.size)]
        failures = [f"rank {r}:\n{a['raised']}" for r, a in enumerate(answers) if "raised" in a]
        assert not failures, "\n".join(failures)
        return [answer["answer"] for answer in answers]
