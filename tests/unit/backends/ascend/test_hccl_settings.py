"""What the environment says, and what communicators take by it."""

import re

import pytest
import torch
from helpers.paths import ROOT

from equipoise.backends.ascend import HCCL, npu_runtime
from equipoise.backends.ascend.hccl_settings import (
    blocking_setting,
    group_buffer_mib,
    link_buffer_mib,
    sum_dtypes,
)
from equipoise.backends.devices.collectives.comm_memory import CommMemoryUsage
from equipoise.hal.capabilities import Available, Unavailable
from equipoise.hal.errors import BackendUnavailable

MIB = 1 << 20
NAMES = ("HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE", "HCCL_DETERMINISTIC", "TORCH_HCCL_BLOCKING_WAIT")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_hccl_buffers_default_to_vendor_sizes() -> None:
    assert (group_buffer_mib(), link_buffer_mib()) == (200, 20)


def test_hccl_buffer_sizes_follow_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "4")
    assert (group_buffer_mib(), link_buffer_mib()) == (64, 4)


def test_link_buffer_of_zero_becomes_smallest_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "0")
    assert link_buffer_mib() == 1


def test_device_bytes_counts_two_buffers_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "100")
    assert HCCL.device_bytes(communicators=3, links=4) == 2 * (3 * 100 + 4 * 20) * MIB


def test_comm_memory_totals_entries_until_removed() -> None:
    usage = CommMemoryUsage()
    usage.add("model/0/0-1", 2 * 200 * MIB)
    usage.add("model/0/0-1/0-1", 2 * 20 * MIB)
    assert [holding.name for holding in usage.entries()] == ["model/0/0-1", "model/0/0-1/0-1"]
    assert usage.total() == 2 * 220 * MIB
    usage.remove("model/0/0-1")
    usage.remove("model/0/0-1")
    assert usage.total() == 2 * 20 * MIB


def test_float_reductions_declared_only_if_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sum_dtypes() == HCCL.capabilities.reductions == {torch.int32, torch.int64}
    for word in ("true", "strict", "TRUE"):
        monkeypatch.setenv("HCCL_DETERMINISTIC", word)
        assert sum_dtypes() >= {torch.float32, torch.bfloat16, torch.float16, torch.int32}
        assert torch.uint8 not in sum_dtypes()
    monkeypatch.setenv("HCCL_DETERMINISTIC", "false")
    assert torch.float32 not in HCCL.capabilities.reductions


def test_probe_refuses_hccl_blocking_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(npu_runtime, "probe", lambda: Available("a device"))
    assert HCCL.probe() == Available("a device")
    monkeypatch.setenv("TORCH_HCCL_BLOCKING_WAIT", "0")
    assert not blocking_setting()
    monkeypatch.setenv("TORCH_HCCL_BLOCKING_WAIT", "1")
    answer = HCCL.probe()
    assert isinstance(answer, Unavailable)
    assert "TORCH_HCCL_BLOCKING_WAIT" in answer.reason


def test_hccl_connect_fails_without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_runtime, "probe", lambda: Unavailable("no torch_npu"))
    with pytest.raises(BackendUnavailable, match="no torch_npu"):
        HCCL.connect(None)  # type: ignore[arg-type]


def test_hccl_undeclared_capabilities_match_contract() -> None:
    """Clause R2."""
    capabilities = HCCL.capabilities
    flags = ("stream_ordered", "independent_groups", "abort", "rebuild", "shared_devices")
    missing = {flag for flag in flags if not getattr(capabilities, flag)}
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    (row,) = [line for line in contract.splitlines() if line.startswith("| communicator `hccl` |")]
    assert missing == set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert capabilities.reductions < capabilities.dtypes
