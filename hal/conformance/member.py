"""One rank process as its driver sees it."""

import json
import os
import signal
import tempfile
from typing import Any

from equipoise.hal.conformance.template import Template

TAIL = 4000
"""Bytes of a rank's standard error that a failure quotes."""
CHUNK = 1 << 16
ENDING = 10.0
"""Seconds that a process which has closed its pipe, or was killed, may take to end."""
STACKS = 2.0
"""Seconds that a process gets to write the stacks of its threads."""


class Member:
    """A copy of a template that runs a module which calls `process.serve`."""

    def __init__(self, template: Template) -> None:
        self._said = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        theirs, self._orders = os.pipe()
        self._answers, replies = os.pipe()
        try:
            self._process = template.copy(theirs, replies, self._errors.fileno())
        except BaseException:
            self._close()
            raise
        finally:
            os.close(theirs)
            os.close(replies)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def pipe(self) -> int:
        """What the rank's answers come through."""
        return self._answers

    def order(self, line: dict[str, Any]) -> None:
        """Send one line; a rank that is already dead is noticed when its answer is read."""
        left = json.dumps(line).encode() + b"\n"
        try:
            while left:
                left = left[os.write(self._orders, left) :]
        except BrokenPipeError:
            return

    def hear(self) -> dict[str, Any] | None:
        """Read once; a whole answer, or None. Raises `EOFError` when the rank is gone."""
        part = os.read(self._answers, CHUNK)
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
        """Why it ended, in words; waits for the end, bounded."""
        code = self._process.wait(ENDING)
        if code is None:
            return "has closed its pipe, and does not end"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def stack(self) -> None:
        """End it by a signal at which it writes the stacks of its threads."""
        self._process.signal(signal.SIGABRT)
        self._process.signal(signal.SIGCONT)
        self._process.wait(STACKS)

    def complaints(self) -> str:
        """The end of its standard error."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - TAIL))
        return self._errors.read().decode(errors="replace")

    def end(self) -> None:
        """Kill it, stopped or not, and give everything back."""
        self._process.signal(signal.SIGKILL)
        try:
            self._process.wait(ENDING)
        finally:
            self._close()

    def _close(self) -> None:
        os.close(self._orders)
        os.close(self._answers)
        self._errors.close()
