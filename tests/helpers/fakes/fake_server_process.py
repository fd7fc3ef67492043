"""Made-up servers, and the program, as processes that can be killed and started again."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from helpers.paths import SEARCH_PATH
from helpers.processes.ports import free_port

PATIENCE = 200.0


@dataclass
class Process:
    """One child, whose lines are read as they come; ended by `close`, whatever happens.

    Attributes:
        said: lines of standard output and standard error so far.
    """

    child: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    _lines: Queue[str] = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def line(self, word: str) -> str:
        """The first line with `word` in it; bounded."""
        while True:
            try:
                line = self._lines.get(timeout=PATIENCE)
            except Empty:
                raise AssertionError(f"no line has {word!r}: {self.said}") from None
            if word in line:
                return line

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(PATIENCE)

    def end(self) -> int:
        """SIGTERM; returns the exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(PATIENCE)

    def close(self) -> None:
        if self.child.poll() is None:
            self.kill()
        self._reader.join(PATIENCE)

    def _read(self) -> None:
        assert self.child.stdout is not None
        with self.child.stdout as lines:
            for line in lines:
                self.said.append(line.rstrip("\n"))
                self._lines.put(self.said[-1])


def spawn(*arguments: str) -> Process:
    """`python -m ...`, with the tests' own folder to import from."""
    path = os.pathsep.join([SEARCH_PATH, os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return Process(child)


class FakeProcess:
    """A made-up server on a port of its own, which it keeps from life to life."""

    def __init__(self, name: str, record: Path, slots: int, pace: float) -> None:
        self.port = free_port()
        fields = {"name": name, "port": self.port, "slots": slots, "pace": pace}
        self._arguments = json.dumps(fields | {"record": str(record)})
        self.name, self.record = name, record
        self.process: Process | None = None

    def start(self) -> None:
        self.process = spawn("helpers.fakes.fake_openai_server", self._arguments)
        self.process.line(str(self.port))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.close()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


def events_of(fakes: Sequence[FakeProcess]) -> Mapping[str, list[dict[str, Any]]]:
    """What the servers have noted, by request."""
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fake in fakes:
        if fake.record.exists():
            for line in fake.record.read_text().splitlines():
                entry = json.loads(line)
                events[entry["id"]].append(entry)
    return events
