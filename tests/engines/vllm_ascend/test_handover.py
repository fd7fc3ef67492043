"""Our channel behind vllm-ascend's worker: real groups, real `execute_model`, every stage."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm_ascend_cpu.faults import HANDOVER, Fault

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]
STEPS = [4, 4, 0, 7, 1, 64, 4, 3]
"""Rows by step, which the runner pads; a step with none hands nothing over."""
COUNT = sum(rows > 0 for rows in STEPS)
OURS = {"pp_transport": {"timeout": 60.0}}
IMPATIENT = {"pp_transport": {"timeout": 5.0}}
"""For stages that wait for what never comes."""


def messages(answer: dict[str, Any]) -> tuple[int, int]:
    """That were sent and received by our channel."""
    return answer["counted"]["sent_messages"], answer["counted"]["received_messages"]


@pytest.mark.parametrize("stages", [2, 3])
def test_stage_receives_exact_tensors_of_previous_stage(play: Play, stages: int) -> None:
    first, *later = play("stages:execute", stages, steps=STEPS, parts=OURS)
    assert messages(first) == (COUNT, 0)
    for at, stage in enumerate(later, start=1):
        assert (stage["early"], stage["absent"], stage["raised"]) == (0, [], "")
        assert stage["finite"]
        assert stage["right"] == [True] * COUNT
        assert messages(stage) == (COUNT if at < stages - 1 else 0, COUNT)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_without_handover_part_run_stock_code(play: Play, stages: int) -> None:
    first, *later = play("stages:execute", stages, steps=STEPS, parts={})
    assert [stage["right"] for stage in later] == [[True] * COUNT] * (stages - 1)
    for stage in (first, *later):
        assert set(stage["counted"].values()) == {0}


def test_worker_waits_for_equipoise_handles_only_with_handover(play: Play) -> None:
    ours, _ = play("stages:execute", 2, steps=STEPS[:1], parts=OURS)
    theirs, _ = play("stages:execute", 2, steps=STEPS[:1], parts={})
    assert ours["handles"] == [["equipoise", "equipoise"]]
    assert theirs["handles"] == [["torch", "torch"]]


@pytest.mark.parametrize("fault", HANDOVER)
def test_handover_planted_fault_is_detected(play: Play, fault: Fault) -> None:
    _, last = play("stages:execute", 2, steps=STEPS, parts=IMPATIENT, fault=fault)
    assert last["right"] != [True] * COUNT
    if fault is Fault.SKIPPED_WAIT:
        assert "does not begin as a message" in last["absent"][0]
