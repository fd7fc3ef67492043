"""One rank process as its driver sees it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

TAIL = 4000
"""Bytes of a rank's standard error that a failure quotes."""
CHUNK = 1 << 16
ENDING = 10.0
"""Seconds that a process which has closed its pipe may take to end."""
STACKS = 2.0
"""Seconds that a process gets to write the stacks of its threads."""
# torch's store looks up the name of every peer; where a name server drops datagrams now and then,
# each drop would cost 5 s. Over TCP none is lost. Read at a process's first look-up, so the driver
# sets it for itself too, where nobody has chosen otherwise.
os.environ.setdefault("RES_OPTIONS", "use-vc")


class Member:
    """A spawned interpreter that runs a module which calls `process.serve`.

    It imports what its driver imports, and nothing that happens to lie in the working directory.

    Args:
        command: name of the module, then its arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._said = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    @property
    def pipe(self) -> int:
        """What the rank's answers come through."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def order(self, line: dict[str, Any]) -> None:
        """Send one line; a rank that is already dead is noticed when its answer is read."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
        except BrokenPipeError:
            return

    def hear(self) -> dict[str, Any] | None:
        """Read once; a whole answer, or None. Raises `EOFError` when the rank is gone."""
        part = os.read(self.pipe, CHUNK)
        if not part:
            raise EOFError
        self._said += part
        line, found, rest = self._said.partition(b"\n")
        if not found:
            return None
        self._said = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def death(self) -> str:
        """Why it ended, in words; waits for the end."""
        code = self.process.wait(timeout=ENDING)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def stack(self) -> None:
        """End it by a signal at which it writes the stacks of its threads."""
        self.process.send_signal(signal.SIGABRT)
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(timeout=STACKS)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def complaints(self) -> str:
        """The end of its standard error."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - TAIL))
        return self._errors.read().decode(errors="replace")

    def end(self) -> None:
        """Kill it, stopped or not, and give everything back."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            assert pipe is not None
            pipe.close()
