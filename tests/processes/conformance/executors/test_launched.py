"""Ranks that a launcher started: rank 0 plays and is played on, the others serve."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes.conformance import launched_rank as launching

from equipoise.backends.cpu import GLOO

SIZE = 3
WATCHDOG = 100.0


@dataclass(frozen=True)
class RankResult:
    """One rank of the launch: its exit code, and what it wrote."""

    code: int
    out: str
    complaints: str


def launch(rank: int, address: tuple[str, int], folder: Path) -> "subprocess.Popen[bytes]":
    """Into files: a pipe that is not read would block a rank that prints much."""
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as error:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "processes.conformance.launched_rank"],
            stdout=out,
            stderr=error,
            env={
                **os.environ,
                launching.PLACE: launching.place(rank, SIZE, address),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OMP_NUM_THREADS": "1",
            },
        )


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    """Results of all ranks of one launch."""
    folder, host = tmp_path_factory.mktemp("launch"), GLOO.host()
    ranks = [launch(rank, host.address, folder) for rank in range(SIZE)]
    try:
        codes = [process.wait(WATCHDOG) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        host.close()
    return [
        RankResult(code, (folder / f"{rank}.out").read_text(), (folder / f"{rank}.err").read_text())
        for rank, code in enumerate(codes)
    ]


@pytest.fixture(scope="module")
def replies_by_property(rank_results: list[RankResult]) -> dict[str, Any]:
    assert rank_results[0].code == 0, rank_results[0].complaints
    replies: dict[str, Any] = json.loads(rank_results[0].out)
    return replies


def test_launched_ranks_end_with_rank_0(rank_results: list[RankResult]) -> None:
    assert [rank.code for rank in rank_results] == [0] * SIZE, [
        rank.complaints for rank in rank_results
    ]


def test_launched_subject_offers_sizes_up_to_launch(replies_by_property: dict[str, Any]) -> None:
    assert replies_by_property["sizes"] == [1, 2, 3]
    assert len(set(replies_by_property["processes"])) == 2


def test_launched_subject_holds_sound_properties_after_violations(
    replies_by_property: dict[str, Any],
) -> None:
    assert [replies_by_property[name][0] for name in ("sound", "pids")] == [
        "PropertyHeld",
        "PropertyHeld",
    ]


def test_launched_subject_blames_failing_rank(replies_by_property: dict[str, Any]) -> None:
    assert replies_by_property["wrong"][0] == "PropertyViolated"
    assert replies_by_property["raising"][1] == "X4: rank 1: raised ValueError: rank 1 was told to"


def test_launched_subject_reports_stack_of_hanging_rank(
    replies_by_property: dict[str, Any],
) -> None:
    kind, what = replies_by_property["hanging"]
    assert kind == "PropertyViolated"
    # 5 s, or more where opening took so long that the deadline was stretched.
    assert re.match(r"C8: rank 1: no answer within [\d.]+ s", what)
    assert "in _hang" in what


def test_launched_subject_injects_nonfatal_faults(replies_by_property: dict[str, Any]) -> None:
    assert (
        replies_by_property["a-fault-ends-what-depends-on-it-and-nothing-else"][0] == "PropertyHeld"
    ), replies_by_property
