"""Ranks as processes: each is told a task on standard input, and writes lines of JSON."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START, POLL = 90.0, 0.2
"""Seconds beside the runs for starting up; seconds between two looks at the ranks."""
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """How the process of a rank is started.

    Attributes:
        prefix: of its command.
        environment: variables beside those of the launcher.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def serve_on_ranks(
    script: Path, tasks: Sequence[dict[str, Any]], places: Sequence[Place], seconds: float
) -> list[Lines]:
    """Run a script once for each task; what each has written into the file that `told` names.

    No process outlives the call. Raises `RuntimeError` where a rank fails, or all take more than
    `seconds`; it quotes what they have printed.
    """
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="equipoise-ranks-") as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(len(tasks))]
        try:
            for task, place, path in zip(tasks, places, outputs, strict=True):
                processes.append(_start(script, {**task, "told": str(path)}, place))
            _wait(processes, outputs, time.monotonic() + START + seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in outputs]


def _log_path(output: Path) -> Path:
    return output.with_suffix(".txt")


def _start(script: Path, task: dict[str, Any], place: Place) -> "subprocess.Popen[str]":
    with _log_path(Path(task["told"])).open("w") as file:
        process = subprocess.Popen(
            [*place.prefix, sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "RES_OPTIONS": os.environ.get("RES_OPTIONS", "use-vc"),
                **place.environment,
            },
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(task) + "\n")
    return process


def _wait(
    processes: "Sequence[subprocess.Popen[str]]", outputs: Sequence[Path], expires: float
) -> None:
    """Until all have ended well."""
    while (codes := [process.poll() for process in processes]) != [0] * len(processes):
        failed_ranks = [rank for rank, code in enumerate(codes) if code]
        timed_out = time.monotonic() > expires
        if failed_ranks or timed_out:
            time.sleep(POLL)  # what the others say about it may explain it
            why = "took too long" if timed_out else f"rank(s) {failed_ranks} failed"
            quotes = [
                f"rank {n}:\n{_log_path(p).read_text()[-2000:]}" for n, p in enumerate(outputs)
            ]
            raise RuntimeError(f"{why}\n" + "\n".join(quotes))
        time.sleep(POLL)
