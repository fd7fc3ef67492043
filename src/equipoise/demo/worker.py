"""A rank as a process of its own: task on standard input, JSON lines on standard output."""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equipoise.demo.rank import serve_rank
from equipoise.demo.record_file import save_record
from equipoise.demo.settings import Balance, RunSettings, Shares
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import ControlLost, EquipoiseError, RankLost

FAILED = 3
"""Exit code of a rank that ends with an error."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """What a rank is started for: the run's settings, and where rank 0 writes the record."""

    settings: RunSettings
    record: Path

    def to_json(self) -> str:
        """One line."""
        fields = asdict(self.settings)
        fields["text"] = [str(path) for path in fields["text"]]
        fields["out"] = str(fields["out"])
        return json.dumps({"settings": fields, "record": str(self.record)})

    @staticmethod
    def from_json(line: str) -> "Task":
        """The inverse of `to_json`."""
        whole: dict[str, Any] = json.loads(line)
        fields = whole["settings"]
        settings = RunSettings(
            **{
                **fields,
                "text": tuple(Path(path) for path in fields["text"]),
                "out": Path(fields["out"]),
                "shares": Shares(fields["shares"]),
                "balance": Balance(fields["balance"]),
            }
        )
        return Task(settings, Path(whole["record"]))


def rendezvous_from(environment: Mapping[str, str], deadline: float) -> Rendezvous:
    """Where torchrun, or our launcher, says that the ranks meet.

    Raises:
        ControlLost: the environment is incomplete.
    """
    try:
        return Rendezvous(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            deadline=deadline,
        )
    except (KeyError, ValueError) as error:
        raise ControlLost(f"the environment names no meeting point: {error}") from error


class JsonLines:
    """Progress as JSON lines for the launcher."""

    def variant(self, name: str, steps: int) -> None:
        """A pass over the traffic begins."""
        say({"variant": name, "steps": steps})

    def step(self, done: int, imbalance: float, note: str) -> None:
        """One more step is through."""
        say({"done": done, "imbalance": imbalance, "note": note})

    def done(self) -> None:
        """The launcher notices by itself."""


def say(message: dict[str, object]) -> None:
    """One line to the launcher."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve, then end the process at once: after a failure, threads of gloo may still hang."""
    _die_with_parent()
    task = Task.from_json(sys.stdin.readline())
    code = FAILED
    try:
        where = rendezvous_from(os.environ, task.settings.deadline)
        record = serve_rank(task.settings, where, JsonLines())
        if record is not None:
            save_record(record, task.record)
        code = 0
    except RankLost as lost:
        say({"lost": lost.rank, "how": lost.how, "operation": lost.operation})
    except EquipoiseError as error:
        say({"failed": str(error)})
    except Exception as error:
        traceback.print_exc()
        say({"failed": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the launcher dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(FAILED)


if __name__ == "__main__":
    main()
