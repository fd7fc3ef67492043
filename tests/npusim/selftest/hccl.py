"""The self-test of simulated communication: `python -m npusim -- python -m npusim.selftest.hccl`.

Right programs must give the right bits without a fault, wrong ones must be told as listed here. A
run takes the schedule that the launcher chose.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from npusim import faults

LIMIT = 180.0
"""Seconds that the ranks of one scenario may take."""
PLAIN = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0", "TASK_QUEUE_ENABLE": "0", "OMP_NUM_THREADS": "1"}
"""For wrong programs: torch_npu's watchdog ends a process whose stream has failed, and an error
of a call comes up where the call is."""
GROUP_LINKS = {"P2P_HCCL_BUFFSIZE": "0"}
"""Messages go through the group's communicator, not through one for each pair."""
DEAD = 134
KILLED = -9


@dataclass(frozen=True)
class Scenario:
    """A program on so many ranks, and how it must end."""

    program: str
    ranks: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[int, int] = field(default_factory=dict)
    """Exit codes other than 0, by rank."""
    told: Sequence[str] = ()
    """Words that stand in the faults; none may be told besides."""


@dataclass(frozen=True)
class Ended:
    """How a scenario ended."""

    codes: dict[int, int]
    compared: int
    told: Counter[str]
    seconds: float
    errors: str


RIGHT = (
    Scenario("everything", 4, GROUP_LINKS),
    Scenario("everything", 3),
    Scenario("everything", 2),
    Scenario("messages", 2, {"NPUSIM_HCCL_LINKS": "stream"}),
)
WRONG = (
    Scenario(
        "told_at_once",
        2,
        PLAIN,
        told=(
            "does not match: rank 0 calls HcclAllReduce of 8 fp32, sum",
            "does not match: rank 0 calls HcclBroadcast of 8 fp32, root 0",
            "does not match: rank 1 calls HcclAlltoAllV",
            "does not match",
            "first use does not match: rank 0 calls HcclAllReduce, rank 1 calls HcclAllGather",
            "ends of a message do not match",
            "more than one block",
        ),
    ),
    Scenario(
        "told_in_time",
        2,
        PLAIN | GROUP_LINKS | {"HCCL_EXEC_TIMEOUT": "2", "NPUSIM_HCCL_LINKS": "stream"},
        told=(
            "HcclSend of 8 fp32 to rank 1 of rank 0 has waited",
            "HcclSend of 8 fp32 to rank 0 of rank 1 has waited",
            "HcclAllReduce of 8 fp32, sum (collective 2) of rank 0 has waited",
        ),
    ),
    Scenario(
        "told_by_calls",
        2,
        PLAIN | GROUP_LINKS | {"HCCL_CONNECT_TIMEOUT": "2"},
        told=("has waited in HcclSend of 8 fp32 to rank",),
    ),
    Scenario("one_device", 2, PLAIN),
    Scenario("slow", 2, {"NPUSIM_HCCL_SLOW": "1:300"}),
    Scenario("dies", 2, PLAIN | {"NPUSIM_HCCL_DIES": "1:3"}, codes={1: DEAD}),
    Scenario("killed", 2, PLAIN, codes={1: KILLED}),
)


def play(scenario: Scenario) -> Ended:
    """Start the ranks and wait for them; none outlives the call."""
    start = time.monotonic()
    with TemporaryDirectory(prefix="npusim-") as name:
        folder = Path(name)
        told = folder / "faults"
        told.touch()
        ranks = [_start(scenario, rank, folder, told) for rank in range(scenario.ranks)]
        outputs = {rank: _finish(process) for rank, process in enumerate(ranks)}
        lines = [line for out, _ in outputs.values() for line in out.splitlines()]
        compared = sum(int(line.split()[1]) for line in lines if line.startswith("compared "))
        codes = {rank: process.returncode for rank, process in enumerate(ranks)}
        errors = "\n".join(error for _, error in outputs.values())
        return Ended(codes, compared, faults.read(told), time.monotonic() - start, errors)


def _start(scenario: Scenario, rank: int, folder: Path, told: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "npusim.selftest.hccl_rank", scenario.program, str(rank)]
    return subprocess.Popen(
        [*command, str(scenario.ranks), str(folder / "store")],
        env={**os.environ, **scenario.environment, faults.VARIABLE: str(told)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def judge(scenario: Scenario, ended: Ended) -> list[str]:
    """What is wrong with how it ended."""
    wanted = {rank: scenario.codes.get(rank, 0) for rank in range(scenario.ranks)}
    found = []
    if ended.codes != wanted:
        found.append(f"exit codes {ended.codes} instead of {wanted}")
    found += [f"no fault says: {words}" for words in scenario.told if not _says(ended, words)]
    unknown = [fault for fault in ended.told if not any(w in fault for w in scenario.told)]
    found += [f"not expected: {fault}" for fault in unknown]
    return found


def _says(ended: Ended, words: str) -> bool:
    return any(words in fault for fault in ended.told)


def main() -> int:
    """Play the scenarios and print the table; 1 when any is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="programs whose name contains this")
    asked = parser.parse_args()
    failures = 0
    for scenario in (*RIGHT, *WRONG):
        if asked.only is not None and asked.only not in scenario.program:
            continue
        ended = play(scenario)
        wrong = judge(scenario, ended)
        failures += bool(wrong)
        print(
            f"{scenario.program:20} {scenario.ranks} ranks {ended.compared:6} compared "
            f"{ended.told.total():3} faults {ended.seconds:6.1f} s {'WRONG' if wrong else 'ok'}",
            flush=True,
        )
        if wrong:
            print("\n".join(f"    {line}" for line in wrong), ended.errors, sep="\n", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
