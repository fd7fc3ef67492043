"""The variable by which torch_npu chooses a communicator's stream."""

import os

import pytest

from equipoise.backends.ascend.hccl_streams import HIGH_PRIORITY_VARIABLE, HighPriorityStreams


@pytest.mark.parametrize("before", [None, "0"])
def test_variable_is_restored_after_last_communicator_is_made(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HIGH_PRIORITY_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(HIGH_PRIORITY_VARIABLE, before)
    high_priority, values = HighPriorityStreams(), []
    high_priority.__enter__()
    high_priority.__enter__()
    high_priority.__exit__(None, None, None)  # the one that came first may well leave first
    values.append(os.environ.get(HIGH_PRIORITY_VARIABLE))
    high_priority.__exit__(None, None, None)
    values.append(os.environ.get(HIGH_PRIORITY_VARIABLE))
    assert values == ["1", before]
