"""Starts the ranks of `engine.py`, and ends every one of them whatever happens."""

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

from emulation import RANKS, Point
from engine_board import Board
from engine_rank import lines

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous

RANK = Path(__file__).parent / "engine_rank.py"
START, POLL = 60.0, 0.2
"""Seconds beside the runs for starting up; seconds between two looks at the ranks."""
PATIENCE = 60.0
"""Seconds that an operation may take."""


@dataclass(frozen=True)
class Run:
    """One pass over the traffic."""

    point: Point
    system: str
    round: int


Told = list[list[dict[str, Any]]]
"""By run, what each rank has written down."""


def serve_all(runs: Sequence[Run], seconds: float) -> Told:
    """Serve every run on four processes.

    Raises:
        RuntimeError: a rank has failed, or they took more than `seconds`; quotes standard error.
    """
    host = registry.communicator("gloo").host()
    try:
        with tempfile.TemporaryDirectory(prefix="equipoise-engine-") as folder:
            return _serve(Path(folder), host.address, runs, seconds)
    finally:
        host.close()


def _serve(folder: Path, address: tuple[str, int], runs: Sequence[Run], seconds: float) -> Told:
    board = folder / "board"
    board.write_bytes(bytes(Board.size(RANKS)))
    told = [folder / f"rank{rank}.jsonl" for rank in range(RANKS)]
    errors = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
    processes = []
    try:
        for rank in range(RANKS):
            where = Rendezvous(
                rank=rank, size=RANKS, host=address[0], port=address[1], deadline=PATIENCE
            )
            task = {
                "where": asdict(where),
                "board": str(board),
                "told": str(told[rank]),
                "runs": [(run.point.fields(), run.system, run.round) for run in runs],
            }
            processes.append(_start(task, errors[rank]))
        _wait(processes, errors, time.monotonic() + START + seconds)
        return list(map(list, zip(*map(lines, told), strict=True)))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _start(task: dict[str, Any], errors: Path) -> "subprocess.Popen[str]":
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(RANK)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "RES_OPTIONS": os.environ.get("RES_OPTIONS", "use-vc"),
            },
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(task) + "\n")
    return process


def _wait(processes: "list[subprocess.Popen[str]]", errors: Sequence[Path], expires: float) -> None:
    """Until all have ended well."""
    while (codes := [process.poll() for process in processes]) != [0] * len(processes):
        failed = [rank for rank, code in enumerate(codes) if code]
        late = time.monotonic() > expires
        if failed or late:
            time.sleep(POLL)  # what the others say about it may explain it
            why = "took too long" if late else f"rank(s) {failed} failed"
            quotes = [f"rank {n}:\n{path.read_text()[-2000:]}" for n, path in enumerate(errors)]
            raise RuntimeError(f"{why}\n" + "\n".join(quotes))
        time.sleep(POLL)
