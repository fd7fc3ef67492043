"""Starts the stages of `pipeline.py` on a link, and ends every one of them whatever happens."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from link_place import Link, Place
from pipeline_work import Work

from equipoise.hal.communicator import Rendezvous

RANK = Path(__file__).parent / "pipeline_rank.py"
START, POLL = 90.0, 0.2
"""Seconds beside the runs for starting up; seconds between two looks at the ranks."""
PATIENCE = 30.0
"""Seconds that a message may take."""


@dataclass(frozen=True)
class Run:
    """One pass over some work."""

    work: Work
    system: str
    round: int


@dataclass(frozen=True)
class Told:
    """What came of some runs on one link.

    Attributes:
        link: what it was measured to be.
        runs: by run, what each stage has written down.
    """

    link: dict[str, Any]
    runs: list[list[dict[str, Any]]]


def serve_all(link: Link, ranks: int, runs: Sequence[Run], seconds: float) -> Told:
    """Serve every run on so many processes.

    Raises:
        RuntimeError: a rank has failed, or they took more than `seconds`; quotes standard error.
    """
    with tempfile.TemporaryDirectory(prefix="equipoise-pipeline-") as folder:
        names = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank, name in enumerate(names):
                processes.append(_start(link.place(rank), _task(link, rank, ranks, name, runs)))
            _wait(processes, names, time.monotonic() + START + seconds)
        finally:
            _end(processes)
        told = [_lines(name) for name in names]
        return Told(told[0][0], list(map(list, zip(*(lines[1:] for lines in told), strict=True))))


def _task(link: Link, rank: int, ranks: int, name: Path, runs: Sequence[Run]) -> dict[str, Any]:
    host, port = link.store
    where = Rendezvous(rank=rank, size=ranks, host=host, port=port, deadline=PATIENCE)
    return {
        "where": asdict(where),
        "delay": asdict(link.delay) if link.delay else None,
        "told": str(name),
        "runs": [(run.work.fields(), run.system, run.round) for run in runs],
    }


def _errors(name: Path) -> Path:
    return name.with_suffix(".txt")


def _start(place: Place, task: dict[str, Any]) -> "subprocess.Popen[str]":
    with _errors(Path(task["told"])).open("w") as file:
        process = subprocess.Popen(
            [*place.prefix, sys.executable, str(RANK)],
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
    processes: "Sequence[subprocess.Popen[str]]", names: Sequence[Path], expires: float
) -> None:
    """Until all have ended well."""
    while (codes := [process.poll() for process in processes]) != [0] * len(processes):
        failed = [rank for rank, code in enumerate(codes) if code]
        late = time.monotonic() > expires
        if failed or late:
            time.sleep(POLL)  # what the others say about it may explain it
            why = "took too long" if late else f"rank(s) {failed} failed"
            quotes = [f"rank {n}:\n{_errors(p).read_text()[-2000:]}" for n, p in enumerate(names)]
            raise RuntimeError(f"{why}\n" + "\n".join(quotes))
        time.sleep(POLL)


def _end(processes: "Sequence[subprocess.Popen[str]]") -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
