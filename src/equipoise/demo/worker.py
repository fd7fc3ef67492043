"""A rank as a process of its own: task on standard input, JSON lines on standard output."""

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equipoise.balancer.formats.iterations import IterationRange
from equipoise.connection import rendezvous_from
from equipoise.demo.progress import LiveMessage
from equipoise.demo.rank import record_rank, serve_rank
from equipoise.demo.run_record import save_record
from equipoise.demo.settings import (
    Balance,
    CommitMode,
    ExchangeForm,
    Locality,
    RecordedContent,
    RecordingSettings,
    RoutingRule,
    RunSettings,
    Shares,
    VariantName,
)
from equipoise.hal.errors import EquipoiseError, RankLost

FAILED = 3
"""Exit code of a rank that ends with an error."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankTask:
    """What a rank is started for.

    Attributes:
        settings: of the run.
        record: where rank 0 writes what was measured.
        launcher: process that started the rank, without which it shall not live.
        recording: what is recorded of one pass; None for a whole run.
    """

    settings: RunSettings
    record: Path
    launcher: int
    recording: RecordingSettings | None = None

    def to_json(self) -> str:
        """One line."""
        fields = asdict(self.settings)
        fields["text"] = [str(path) for path in fields["text"]]
        fields["out"] = str(fields["out"])
        fields["placement"] = _text_of(self.settings.placement)
        whole = {
            "settings": fields,
            "record": str(self.record),
            "launcher": self.launcher,
            "recording": _fields_of(self.recording),
        }
        return json.dumps(whole)

    @staticmethod
    def from_json(line: str) -> "RankTask":
        """The inverse of `to_json`."""
        whole: dict[str, Any] = json.loads(line)
        fields = whole["settings"]
        settings = RunSettings(
            **{
                **fields,
                "text": tuple(Path(path) for path in fields["text"]),
                "out": Path(fields["out"]),
                "placement": fields["placement"] and Path(fields["placement"]),
                "shares": Shares(fields["shares"]),
                "variants": tuple(VariantName(name) for name in fields["variants"]),
                "exchange": ExchangeForm(fields["exchange"]),
                "locality": Locality(fields["locality"]),
                "routing_rule": RoutingRule(fields["routing_rule"]),
                "commit": CommitMode(fields["commit"]),
                "balance": Balance(fields["balance"]),
            }
        )
        recording = _recording_of(whole["recording"])
        return RankTask(settings, Path(whole["record"]), whole["launcher"], recording)


def _text_of(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _fields_of(recording: RecordingSettings | None) -> list[str] | None:
    if recording is None:
        return None
    return [str(recording.folder), str(recording.steps), str(recording.content)]


def _recording_of(fields: list[str] | None) -> RecordingSettings | None:
    if fields is None:
        return None
    folder, steps, content = fields
    return RecordingSettings(Path(folder), IterationRange.parse(steps), RecordedContent(content))


class LauncherPipe:
    """JSON lines to the launcher, on a descriptor that nothing else writes to.

    Standard output is pointed at standard error, so that whatever a backend or a library prints
    is seen, and cannot be taken for a message. Messages come from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, message: dict[str, object]) -> None:
        """One message."""
        line = json.dumps(message) + "\n"
        with self._lock:
            self._pipe.write(line)
            self._pipe.flush()

    def variant(self, name: str, steps: int) -> None:
        """A pass over the traffic begins."""
        self.send({"variant": name, "steps": steps})

    def step(self, done: int, imbalance: float, note: str) -> None:
        """One more step is through."""
        self.send({"done": done, "imbalance": imbalance, "note": note})

    def live(self, message: LiveMessage) -> None:
        """Something for a live display."""
        self.send(message)

    def done(self) -> None:
        """The launcher notices by itself."""


def main() -> None:
    """Serve, then end the process at once: after a failure, threads of gloo may still hang."""
    line = sys.stdin.readline()
    if not line:
        os._exit(FAILED)  # the launcher has ended before it sent a task
    task, pipe = RankTask.from_json(line), LauncherPipe()
    _die_with(task.launcher)
    code = FAILED
    try:
        _work(task, pipe)
        code = 0
    except RankLost as loss:
        pipe.send({"lost": loss.rank, "how": loss.reason, "operation": loss.operation})
    except EquipoiseError as error:
        pipe.send({"failed": str(error)})
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"failed": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(code)


def _work(task: RankTask, pipe: LauncherPipe) -> None:
    where = rendezvous_from(os.environ, task.settings.deadline)
    if task.recording is not None:
        record_rank(task.settings, task.recording, where, pipe)
        return
    record = serve_rank(task.settings, where, pipe)
    if record is not None:
        save_record(record, task.record)


def _die_with(launcher: int) -> None:
    """Ask the kernel to kill this process when the launcher dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(FAILED)


if __name__ == "__main__":
    main()
