"""What the communicator over NCCL says of itself, and by which settings: clauses B1, B2, R2."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.paths import ROOT
from torch import Tensor

from equipoise.backends.cuda import cuda_runtime, nccl
from equipoise.backends.cuda.driver_streams import new_stream
from equipoise.backends.cuda.nccl import (
    WARMUP_SIZES,
    FlagEvent,
    Nccl,
    NcclBackend,
    connect_algorithms,
)
from equipoise.backends.cuda.nccl_api import NcclApi, NcclError
from equipoise.backends.cuda.nccl_settings import blocking_setting, estimate_bytes, sum_dtypes
from equipoise.backends.devices.collectives.ccl import CommSpec
from equipoise.backends.devices.runtime import Device
from equipoise.hal.capabilities import Available, Unavailable
from equipoise.hal.errors import BackendUnavailable

MIB = 1 << 20
NAMES = (
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_COMM_BLOCKING", "NCCL_ALGO"),
    *("NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MULTI_RANK_GPU_ENABLE"),
)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda_runtime, "probe", lambda: Available("a GPU"))
    monkeypatch.setattr(cuda_runtime, "stream_memory", lambda: "")


def backend(*version: int) -> NcclBackend:
    api: Any = SimpleNamespace(version=lambda: version)
    return NcclBackend(lambda: api)


def load_missing_library() -> NcclApi:
    raise OSError("libnccl.so.2: cannot open shared object file")


def reason(nccl_backend: NcclBackend) -> str:
    answer = nccl_backend.probe()
    assert isinstance(answer, Unavailable)
    return answer.reason


def test_probe_reports_nccl_version() -> None:
    assert backend(2, 27, 3).probe() == Available("a GPU; NCCL 2.27.3")


def test_connect_fails_without_nccl() -> None:
    nccl_backend = NcclBackend(load_missing_library)
    assert "NCCL does not load: libnccl.so.2" in reason(nccl_backend)
    with pytest.raises(BackendUnavailable, match=r"libnccl\.so\.2"):
        nccl_backend.connect(None)  # type: ignore[arg-type]


def test_probe_refuses_nccl_older_than_2_17() -> None:
    assert reason(backend(2, 16, 5)) == "NCCL 2.16.5 is too old: 2.17 is needed"
    assert isinstance(backend(2, 17, 1).probe(), Available)


def test_probe_reports_device_problem_before_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "stream_memory", lambda: "cuda-bindings is not installed")
    assert reason(backend(2, 27, 3)) == "cuda-bindings is not installed"
    monkeypatch.setattr(cuda_runtime, "probe", lambda: Unavailable("no GPU"))
    assert reason(backend(2, 27, 3)) == "no GPU"


@pytest.mark.parametrize(
    ("name", "wrong_value", "harmless_value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "32"),
        ("NCCL_COMM_BLOCKING", "1", "0"),
    ],
)
def test_probe_refuses_blocking_environment_settings(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong_value: str, harmless_value: str
) -> None:
    monkeypatch.setenv(name, harmless_value)
    assert blocking_setting() == ""
    monkeypatch.setenv(name, wrong_value)
    assert f"{name}={wrong_value} is set" in reason(backend(2, 27, 3))


def test_float_reductions_declared_only_with_ring_algorithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl_backend = backend(2, 27, 3)
    assert sum_dtypes() == nccl_backend.capabilities.reductions == {torch.int32, torch.int64}
    for name, floats in (("Ring", True), ("ring", True), ("Tree", False), ("ring,tree", False)):
        monkeypatch.setenv("NCCL_ALGO", name)
        assert (torch.float32 in nccl_backend.capabilities.reductions) == floats
        assert torch.int64 in nccl_backend.capabilities.reductions


def test_shared_devices_need_nccl_2_30_and_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not backend(2, 30, 1).capabilities.shared_devices
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert backend(2, 30, 1).capabilities.shared_devices
    assert not backend(2, 29, 7).capabilities.shared_devices
    assert not NcclBackend(load_missing_library).capabilities.shared_devices


def test_capabilities_are_readable_without_nccl() -> None:
    capabilities = NcclBackend(load_missing_library).capabilities
    assert capabilities.abort
    assert capabilities.stream_ordered
    assert capabilities.rebuild
    assert not capabilities.independent_groups


def test_device_bytes_follow_nccl_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (estimate_bytes(link=False), estimate_bytes(link=True)) == (2 * 8 * 4 * MIB, 8 * 4 * MIB)
    monkeypatch.setenv("NCCL_BUFFSIZE", str(MIB))
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "2")
    assert backend(2, 27, 3).device_bytes(communicators=3, links=4) == (3 * 2 + 4) * 2 * MIB


def test_nccl_undeclared_capabilities_match_contract() -> None:
    """Clause R2."""
    capabilities = backend(2, 27, 3).capabilities
    flags = ("stream_ordered", "independent_groups", "abort", "rebuild", "shared_devices")
    missing = {flag for flag in flags if not getattr(capabilities, flag)}
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    (row,) = [line for line in contract.splitlines() if line.startswith("| communicator `nccl` |")]
    assert missing == set(re.findall(r"`(\w+)`", row.split("|")[2]))


def test_nccl_uses_device_opened_by_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_runtime.RUNTIME, "devices", lambda: 2)
    monkeypatch.setattr(cuda_runtime.RUNTIME, "set_thread_device", lambda index: None)
    monkeypatch.setattr(cuda_runtime.RUNTIME, "free_memory", lambda index: (1, 1))
    monkeypatch.setattr(cuda_runtime, "_queues", None)
    monkeypatch.setattr(cuda_runtime.RUNTIME, "_selected_index", None)
    assert [Nccl(load_missing_library).device(rank) for rank in (0, 1, 2)] == [0, 1, 0]
    cuda_runtime.RUNTIME.select_device(1)
    assert Nccl(load_missing_library).device(0) == 1


def test_own_stream_is_created_with_highest_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class Driver:
        CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING="alone")

        def cuCtxGetStreamPriorityRange(self) -> tuple[int, int, int]:
            return 0, 0, -5

        def cuStreamCreateWithPriority(self, flag: str, priority: int) -> tuple[int, int]:
            calls.append((flag, priority))
            return 0, 0xABC

    def external(handle: int, device: int) -> tuple[int, int]:
        return handle, device

    vendor: Any = SimpleNamespace(set_thread_device=lambda index: calls.append("device"))
    monkeypatch.setattr(cuda_runtime, "bind_context", lambda index: calls.append("context"))
    monkeypatch.setattr(cuda_runtime, "driver", Driver)
    monkeypatch.setattr(cuda_runtime, "cuda", lambda: SimpleNamespace(ExternalStream=external))
    driver_stream = new_stream(Device(vendor, 3))
    assert calls == ["device", "context", ("alone", -5)]
    assert (driver_stream.stream, driver_stream.handle) == ((0xABC, 3), 0xABC)


class RecordedEvent:
    """An event of the vendor's."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def record(self, stream: Any) -> None:
        self._calls.append(("record", stream))

    def wait(self, stream: Any) -> None:
        self._calls.append(("event", stream))


def test_flag_event_waits_by_event_once_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be said by an event is: the order that a word makes is not visible to CUDA."""
    calls: list[Any] = []
    word = SimpleNamespace(
        enqueue_wait=lambda stream, value: calls.append(("word", stream)),
        enqueue_write=lambda stream, value: calls.append(("write", stream)),
    )
    monkeypatch.setattr(nccl, "host_flag_pool", lambda device: SimpleNamespace(take=lambda: word))
    monkeypatch.setattr(nccl, "bind_device", lambda device: None)
    vendor: Any = SimpleNamespace(
        current_stream=lambda index: "waiting", event=lambda: RecordedEvent(calls)
    )
    promise = FlagEvent(Device(vendor, 0))
    promise.wait()
    promise.record("writing")
    promise.wait()
    assert calls == [
        ("word", "waiting"),
        ("write", "writing"),
        ("record", "writing"),
        ("event", "waiting"),
    ]


class NcclWithoutPeer:
    """NCCL's functions by the names of `NcclApi`, where a peer never joins."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def unique_id(self) -> bytes:
        return b"where"

    def join(self, where: bytes, size: int, rank: int, max_ctas: int) -> str:
        self.calls.append(f"join {max_ctas}")
        return "comm"

    def in_progress(self, comm: str) -> bool:
        return True

    def abort(self, comm: str) -> None:
        self.calls.append(f"abort {comm}")


class Handshake:
    """All members hear each other, until the deadline comes."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self._remaining = [0.2, 0.1, 0.0]

    @property
    def remaining(self) -> float:
        return self._remaining.pop(0)

    def publish(self, *word: object) -> None:
        """Nobody asks for it."""

    def wait_for(self, *word: object) -> tuple[bytes, ...]:
        return ()


def test_join_without_peer_is_aborted_at_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "bind_device", lambda device: None)
    api: Any = NcclWithoutPeer()
    handshake: Any = Handshake()
    members = CommSpec("pair", (0, 1), 0, is_link=True, deadline=1.0)
    greeting: Any = None
    with pytest.raises(NcclError, match="not all ranks have joined in time; it was aborted"):
        Nccl(lambda: api).init_comm(members, Device(cuda_runtime.RUNTIME, 0), handshake, greeting)
    assert api.calls == ["join 8", "abort comm"]


class Sizes:
    """Notes how many bytes each collective is given."""

    def __init__(self) -> None:
        self.sizes_by_operation: dict[str, list[int]] = {}

    def all_reduce(self, tensor: Tensor) -> None:
        self.sizes_by_operation.setdefault("all_reduce", []).append(tensor.nbytes)

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> None:
        assert tensor.numel() == 3 * out.numel()
        self.sizes_by_operation.setdefault("reduce_scatter", []).append(tensor.nbytes)

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        assert out.numel() == 3 * tensor.numel()
        self.sizes_by_operation.setdefault("all_gather", []).append(out.nbytes)


def test_connect_uses_each_collective_at_sizes_of_each_algorithm() -> None:
    """NCCL chooses the algorithm by the size, and connects it when it is first used."""
    group: Any = Sizes()
    memory = connect_algorithms(group, 3, "cpu")
    assert group.sizes_by_operation["all_reduce"] == list(WARMUP_SIZES)
    for name in ("reduce_scatter", "all_gather"):
        assert max(group.sizes_by_operation[name]) > MIB
        assert min(group.sizes_by_operation[name]) <= 12
    assert sum(tensor.nbytes for tensor in memory) <= 2 * max(WARMUP_SIZES)
