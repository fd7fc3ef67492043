"""Runs a case in processes of their own, under a watchdog, and tells what they did."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.vllm.runs.case import Case
from engines.vllm.runs.process_cleanup import (
    VARIABLE,
    Kin,
    end_all,
    remove_unused,
    segments_of,
    tell_stacks,
)
from helpers.paths import SEARCH_PATH
from vllm_cpu import faults
from vllm_cpu import missing_features as holes
from vllm_cpu import vllm_counters as watch

LIMIT = 1500.0
"""Seconds that a run may take."""
LOOK = 1.0
"""Seconds between two looks at what shared memory a run has."""
COUNTERS = "EQUIPOISE_COUNTERS"
"""Names the folder into which a process may write `NAME-PID.json`: it is read at the end."""
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONFAULTHANDLER": "1",
    # Some functions of vLLM's are compiled whatever `enforce_eager` says: 10 s of g++ a run.
    "TORCH_COMPILE_DISABLE": "1",
    # 0.33 gives each data-parallel rank a memory node of its own, and there is one; unless this is
    # set, and to 0.
    "VLLM_CPU_SIM_MULTI_NUMA": "0",
}
"""Of every run: no network, no compiler, and as many threads as there are ranks."""
OFFLINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""Where the driver is the engine: its workers are forked from it, and vLLM is imported once."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        code: exit code of the driver; None where the watchdog ended it.
        answers: what the driver wrote; None where it did not come so far.
        counters: what each process wrote into the folder of counters, with `name` and `pid`.
        output: all that was printed.
        remaining_processes: those that outlived the driver, and were ended. vLLM kills its
            workers without waiting for them, so that on a busy machine there are some.
    """

    code: int | None
    answers: dict[str, Any] | None
    counters: list[dict[str, Any]]
    output: str
    remaining_processes: list[int]

    @property
    def rounds(self) -> list[list[list[int]]]:
        """Tokens by round and prompt; fails the test where there are none."""
        assert self.code == 0, f"exit code {self.code}:\n{self.output[-6000:]}"
        assert self.answers is not None
        rounds_of_tokens: list[list[list[int]]] = self.answers["rounds"]
        return rounds_of_tokens

    @property
    def rpc_results(self) -> dict[str, list[Any]]:
        """What each worker answered to each of the case's `asks`."""
        assert self.answers is not None, self.output[-6000:]
        results_by_method: dict[str, list[Any]] = self.answers["asked"]
        return results_by_method

    @property
    def metrics(self) -> str:
        """What the server told at `/metrics` in the end; empty without a server."""
        assert self.answers is not None, self.output[-6000:]
        return str(self.answers["metrics"])

    def of(self, name: str) -> list[dict[str, Any]]:
        """Counters that processes wrote under a name, by rank."""
        counters_of_name = [one for one in self.counters if one["name"] == name]
        return sorted(counters_of_name, key=lambda one: one.get("rank", -1))


def run(case: Case, folder: Path, limit: float = LIMIT) -> Outcome:
    """Run a case; `folder` is empty, and takes its files."""
    kin, segments = Kin(uuid.uuid4().hex), set[Path]()
    (folder / "counters").mkdir()
    (folder / "case.json").write_text(case.text, encoding="utf-8")
    with (
        (folder / "said.txt").open("wb") as output_file,
        TemporaryDirectory(prefix="equipoise-", ignore_cleanup_errors=True) as passing,
    ):
        try:
            with _driver_process(case, folder, passing, kin, output_file.fileno()) as driver:
                kin = replace(kin, leader=driver.pid)
                code = _await(driver, kin, segments, limit)
        finally:
            remaining_processes = end_all(kin)
            remove_unused(segments)
    return _outcome(folder, code, remaining_processes)


def _await(
    driver: subprocess.Popen[bytes], kin: Kin, segments: set[Path], limit: float
) -> int | None:
    """The exit code, or None after `limit` seconds; notes what shared memory there is meanwhile."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            return driver.wait(LOOK)
        segments |= segments_of(kin)
    return None


@contextmanager
def _driver_process(
    case: Case, folder: Path, passing: str, kin: Kin, output_descriptor: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The driver; its standard input is a pipe that nobody writes to, see `end_with_parent`."""
    module = {
        "offline": "engines.vllm.runs.run_offline",
        "server": "engines.vllm.runs.run_server",
        "proxied": "engines.vllm.runs.run_proxied",
    }[case.front]
    driver = subprocess.Popen(
        [sys.executable, "-P", "-m", module, "case.json", "answers.json"],
        cwd=folder,
        # Sockets and stores of its processes, which leave them behind; not in the case's folder,
        # whose name may be too long for a socket.
        env={**_environment(case, folder, kin.mark), "TMPDIR": passing},
        stdin=subprocess.PIPE,
        stdout=output_descriptor,
        stderr=output_descriptor,
        start_new_session=True,
    )
    try:
        yield driver
    finally:
        if driver.poll() is None:
            tell_stacks(replace(kin, leader=driver.pid))
            driver.kill()
        assert driver.stdin is not None
        driver.stdin.close()
        driver.wait()


def _environment(case: Case, folder: Path, mark: str) -> dict[str, str]:
    # Absolute, since the driver runs in another folder.
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [SEARCH_PATH, *(str(Path(path).resolve()) for path in python_path if path)]
    ours = {
        VARIABLE: mark,
        COUNTERS: str(folder / "counters"),
        watch.VARIABLE: str(folder / "counters"),
        holes.VARIABLE: holes.named(case.holes),
        faults.VARIABLE: case.fault or "",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    inside = OFFLINE if case.front == "offline" else {}
    return {**os.environ, **SETTINGS, **inside, **ours, **case.environment}


def _outcome(folder: Path, code: int | None, remaining_processes: list[int]) -> Outcome:
    answers_file = folder / "answers.json"
    answers = (
        json.loads(answers_file.read_text(encoding="utf-8")) if answers_file.exists() else None
    )
    output = (folder / "said.txt").read_text(encoding="utf-8", errors="replace")
    return Outcome(code, answers, list(_counters(folder / "counters")), output, remaining_processes)


def _counters(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*-*.json")):
        name, _, pid = path.stem.rpartition("-")
        yield {**json.loads(path.read_text(encoding="utf-8")), "name": name, "pid": int(pid)}
