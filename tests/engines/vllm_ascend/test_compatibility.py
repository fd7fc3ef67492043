"""A vllm-ascend that is not as it was tested: one error that names it, and nothing is changed."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)
Play = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("broken", "parts", "phrases"),
    [
        ("version", {"eplb_policy": True}, ["version 0.24.0 was not tested", "tested: 0.23.0"]),
        ("missing", {"eplb_policy": True}, ["eplb_worker:EplbWorker.calculate_rebalance_experts"]),
        (
            "signature",
            {"pp_transport": True},
            ["isend_tensor_dict has the signature (self, tensors), not (self, tensor_dict, dst="],
        ),
        ("family", {"pp_transport": True}, ["it is built for _310P, which has another worker"]),
        ("nothing", {"eplb": True}, ["eplb: vllm-ascend moves experts by itself"]),
    ],
)
def test_compatibility_error_names_cause_and_changes_nothing(
    play: Play, broken: str, parts: dict[str, Any], phrases: list[str]
) -> None:
    for answer in play("compatibility:refused", 2, broken=broken, parts=parts):
        assert answer["said"].startswith("EngineUnsupported: equipoise cannot serve vllm-ascend ")
        assert answer["said"].endswith("nothing of it was changed")
        assert [name for name in phrases if name not in answer["said"]] == []
        assert answer["left"] == [False, False, False]


def test_worker_accepts_parts_when_release_is_intact(play: Play) -> None:
    parts = {"eplb_policy": True, "pp_transport": True}
    for answer in play("compatibility:refused", 2, broken="nothing", parts=parts):
        assert answer == {"said": "", "left": [False, False, False]}


def test_doctor_finds_all_symbols_of_installed_vllm_ascend(play: Play) -> None:
    (findings,) = play("compatibility:looked_at", 1)
    assert [what for what, (passed, _) in findings.items() if passed is None] == ["eplb"]
    assert [what for what, (passed, _) in findings.items() if passed is False] == []
    assert findings["vllm-ascend"] == [True, "0.23.0, which was tested"]
    assert findings["vLLM"] == [True, "0.23.0, which was tested"]


def test_vllm_resolves_ascend_worker_by_name(play: Play) -> None:
    name = "equipoise.integrations.vllm_ascend.Worker"
    (bases,) = play("compatibility:resolved", 1, name=name)
    assert bases[0] == name
    assert "vllm_ascend.worker.worker.NPUWorker" in bases
