"""What HCCL and torch_npu make easy to get wrong, on rank processes: clauses E1, R1, X5.

What all libraries share is in `tests/backends/devices/collectives`.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers.processes.rank_pool import Case, Ranks
from helpers.rank_programs import hccl


@pytest.fixture
def play(ranks: Ranks) -> Callable[..., list[Any]]:
    """`play(program, size, **arguments)` over HCCL."""

    def run(
        program: Callable[..., Any],
        size: int,
        deadline: float = 15.0,
        spoils: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        return ranks.play(
            Case(
                program=f"{program.__module__}:{program.__qualname__}",
                size=size,
                arguments={"backend": "ascend", **arguments},
                deadline=deadline,
                spoils=spoils,
                communicator="equipoise.backends.ascend:HCCL",
            )
        )

    return run


Play = Callable[..., list[Any]]


def test_hccl_refuses_more_communicators_than_streams(play: Play) -> None:
    for (refusal,) in play(hccl.too_many, 2, count=31):
        assert refusal["error"] == "CommunicatorFailed"
        assert "no stream is left for HCCL: the pool has 32" in refusal["text"]
        assert "c7/0/0-1" in refusal["text"]


def test_hccl_communicator_leaves_process_state_unchanged(play: Play) -> None:
    for state in play(hccl.surroundings, 2):
        assert state == {"environment": True, "initialised": False, "watchdogs": 0, "ours": True}


def test_device_error_fails_only_its_communicator(play: Play) -> None:
    for failure, repeated in play(hccl.mismatch, 2, spoils=True):
        assert failure["error"] == "CommunicatorFailed"
        assert "all_reduce of 'hit' failed on the device" in failure["text"]
        assert repeated["error"] == "CommunicatorFailed"
        assert "barrier of 'hit'" in repeated["text"]


def test_hccl_refuses_unsupported_operands(play: Play) -> None:
    for refusals in play(hccl.refused, 2):
        assert [one["error"] for one in refusals] == ["Unsupported"] * 5
        reasons = ("on npu", "private format", r"npu:\d is needed", "not summed", "blob")
        for one, words in zip(refusals, reasons, strict=True):
            assert re.search(words, one["text"]), one["text"]
