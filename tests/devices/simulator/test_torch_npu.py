"""What the real torch_npu shows of the simulated device."""

import pytest
from devices.simulator.simulated_program import Outcome, run_program

pytestmark = pytest.mark.deep

ALIKE = (
    "fresh",
    "streams",
    "unrecorded_event",
    "out_of_memory",
    "external_event",
    "captured_stream",
    "device_of_new_thread",
)
LAUNCHED_AT_ONCE = {"TASK_QUEUE_ENABLE": "0"}


def look(*names: str, schedule: str = "lazy") -> Outcome:
    """Look at something in a process of its own."""
    return run_program("torch_npu_facts", schedule, arguments=names, environment=LAUNCHED_AT_ONCE)


@pytest.fixture(scope="module", params=["lazy", "explore"])
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """What leaves the device intact, looked at in one process for each schedule."""
    return look(*ALIKE, schedule=request.param)


def test_torch_npu_new_tensor_holds_poison(outcome: Outcome) -> None:
    assert outcome.facts["fresh"] == [0xA7] * 64


def test_torch_npu_reuses_first_stream_as_33rd(outcome: Outcome) -> None:
    assert outcome.facts["streams"] == [32, 0]


def test_torch_npu_wait_for_unrecorded_event_passes(outcome: Outcome) -> None:
    assert outcome.facts["unrecorded_event"] == [True, True]


def test_torch_npu_survives_out_of_memory_error(outcome: Outcome) -> None:
    assert outcome.facts["out_of_memory"] == "OutOfMemoryError"


def test_torch_npu_external_event_waits_for_later_record(outcome: Outcome) -> None:
    assert outcome.facts["external_event"] == [False, True]


def test_torch_npu_streams_say_nothing_of_captures(outcome: Outcome) -> None:
    """`torch.Stream.is_capturing` is not what the binding can ask."""
    assert outcome.facts["captured_stream"] == [True, False]


def test_torch_accelerator_gives_new_thread_the_first_npu(outcome: Outcome) -> None:
    """So the binding does not ask it for the device of a thread."""
    assert outcome.facts["device_of_new_thread"] == 0


def test_torch_npu_capture_forbids_synchronisation() -> None:
    message = look("synchronisation_in_a_capture").facts["synchronisation_in_a_capture"]
    assert "error code is 107027" in message


def test_torch_npu_index_error_repeats_at_every_synchronisation() -> None:
    facts = look("index_out_of_range").facts["index_out_of_range"]
    assert len(facts["raised"]) == 2
    for message in facts["raised"]:
        assert "507015" in message
        assert "index 99 is out of bounds" in message


def test_torch_npu_missing_operator_is_named() -> None:
    facts = look("missing_operator").facts["missing_operator"]
    assert "Erfinv" in facts["raised"]
    assert "the operator Erfinv of the older interface is not simulated" in facts["told"]
