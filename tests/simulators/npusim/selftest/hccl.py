"""The self-test of simulated communication: `python -m npusim -- python -m npusim.selftest.hccl`.

Right programs must give the right bits without a fault, wrong ones must be told as listed here. A
run takes the schedule that the launcher chose.
"""

import argparse
import atexit
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import NoReturn

from npusim import faults
from npusim.selftest import hccl_rank, hccl_right, hccl_wrong

LIMIT = 180.0
"""Seconds that the ranks of one scenario may take."""
PLAIN = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0", "TASK_QUEUE_ENABLE": "0"}
"""For wrong programs: torch_npu's watchdog ends a process whose stream has failed, and an error
of a call comes up where the call is."""
GROUP_LINKS = {"P2P_HCCL_BUFFSIZE": "0"}
"""Messages go through the group's communicator, not through one for each pair."""
STREAM_LINKS = {"NPUSIM_HCCL_LINKS": "stream"}
DEAD = 134
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Scenario:
    """A program on so many ranks, and how it must end."""

    program: str
    ranks: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[int, int] = field(default_factory=dict)
    """Exit codes other than 0, by rank; negative: the signal."""
    faults: Sequence[str] = ()
    """Words that stand in the faults; none may be told besides."""


@dataclass(frozen=True)
class RunResult:
    """How a scenario ended."""

    codes: dict[int, int]
    compared: int
    faults: Counter[str]
    seconds: float
    output: str


RIGHT = (
    Scenario("alone", 1),
    Scenario("everything", 2),
    Scenario("everything", 3),
    Scenario("everything", 4, GROUP_LINKS),
    Scenario("messages", 2, STREAM_LINKS),
)
WRONG = (
    Scenario(
        "told_at_once",
        2,
        PLAIN,
        faults=(
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
        PLAIN | GROUP_LINKS | STREAM_LINKS | {"HCCL_EXEC_TIMEOUT": "2"},
        faults=(
            "HcclSend of 8 fp32 to rank 1 of rank 0 has waited",
            "HcclSend of 8 fp32 to rank 0 of rank 1 has waited",
            "HcclAllReduce of 8 fp32, sum (collective 2) of rank 0 has waited",
        ),
    ),
    Scenario(
        "told_by_calls",
        2,
        PLAIN | GROUP_LINKS | {"HCCL_CONNECT_TIMEOUT": "2"},
        faults=("has waited in HcclSend of 8 fp32 to rank",),
    ),
    Scenario("one_device", 2, PLAIN),
    Scenario("slow", 2, {"NPUSIM_HCCL_SLOW": "1:300"}),
    Scenario("dies", 2, PLAIN | {"NPUSIM_HCCL_DIES": "1:3"}, codes={1: DEAD}),
    Scenario("killed", 2, PLAIN, codes={1: KILLED}),
)

KINDS = {"right": RIGHT, "wrong": WRONG}


def play(scenario: Scenario) -> RunResult:
    """Fork the ranks and wait for them; none outlives the call."""
    start = time.monotonic()
    folder = Path(mkdtemp(prefix="npusim-"))  # a rank runs the exit functions, which leave it be
    try:
        fault_file = folder / "faults"
        fault_file.touch()
        ranks = {_fork(scenario, rank, folder): rank for rank in range(scenario.ranks)}
        codes = _wait(ranks)
        output = "".join((folder / f"out{rank}").read_text() for rank in ranks.values())
        lines = [line for line in output.splitlines() if line.startswith("compared ")]
        compared = sum(int(line.split()[1]) for line in lines)
        return RunResult(codes, compared, faults.read(fault_file), time.monotonic() - start, output)
    finally:
        rmtree(folder)


def _fork(scenario: Scenario, rank: int, folder: Path) -> int:
    """A rank begins with torch loaded and no device in use: that saves seconds for each."""
    process = os.fork()
    if process == 0:
        _become(scenario, rank, folder)
    return process


def _become(scenario: Scenario, rank: int, folder: Path) -> NoReturn:
    code = 1
    try:
        out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(scenario.environment)
        os.environ[faults.VARIABLE] = str(folder / "faults")
        program = (hccl_right.PROGRAMS | hccl_wrong.PROGRAMS)[scenario.program]
        compared = hccl_rank.run(program, rank, scenario.ranks, str(folder / "store"))
        print(f"compared {compared}", flush=True)
        if scenario.program in hccl_right.PROGRAMS:
            hccl_rank.leave()
            atexit._run_exitfuncs()  # what torch_npu does at the end of a process
        code = 0
    except BaseException:  # not even an exit may get into the frames of the parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: Mapping[int, int]) -> dict[int, int]:
    """Exit codes by rank."""
    codes: dict[int, int] = {}
    start = time.monotonic()
    while len(codes) < len(ranks):
        for process, rank in ranks.items():
            if rank in codes:
                continue
            if time.monotonic() - start > LIMIT:
                os.kill(process, signal.SIGKILL)
            ended_process, status = os.waitpid(process, os.WNOHANG)
            if ended_process:
                codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return dict(sorted(codes.items()))


def judge(scenario: Scenario, result: RunResult) -> list[str]:
    """What is wrong with how it ended."""
    expected_codes = {rank: scenario.codes.get(rank, 0) for rank in range(scenario.ranks)}
    messages = []
    if result.codes != expected_codes:
        messages.append(f"exit codes {result.codes} instead of {expected_codes}")
    if result.compared == 0:
        messages.append("nothing was compared")
    messages += [f"no fault says: {words}" for words in scenario.faults if not _says(result, words)]
    unknown = [fault for fault in result.faults if not any(w in fault for w in scenario.faults)]
    return messages + [f"not expected: {fault}" for fault in unknown]


def _says(result: RunResult, words: str) -> bool:
    return any(words in fault for fault in result.faults)


def selected_scenarios(kind: str | None, only: str | None, ranks: int | None) -> list[Scenario]:
    """Which scenarios are played."""
    return [
        scenario
        for each in KINDS
        for scenario in KINDS[each]
        if kind in (None, each)
        and (only is None or only in scenario.program)
        and ranks in (None, scenario.ranks)
    ]


def main() -> int:
    """Play the scenarios and print the table; 1 when any is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="only programs that are right, or wrong")
    parser.add_argument("--only", help="programs whose name contains this")
    parser.add_argument("--ranks", type=int, help="only those with so many ranks")
    options = parser.parse_args()
    failures = 0
    for scenario in selected_scenarios(options.kind, options.only, options.ranks):
        result = play(scenario)
        messages = judge(scenario, result)
        failures += bool(messages)
        print(
            f"{scenario.program:15} {scenario.ranks} ranks {result.compared:6} compared "
            f"{result.faults.total():3} faults "
            f"{result.seconds:6.1f} s {'WRONG' if messages else 'ok'}",
            flush=True,
        )
        if messages:
            print(
                "\n".join(f"    {line}" for line in messages), result.output, sep="\n", flush=True
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
