"""Words that the host and a GPU share, over a driver that only writes down what it is told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.backends.cuda import native, word
from equipoise.backends.cuda.word import LINE, PAGE, Shelf, Word
from equipoise.backends.cuda.words import CudaEmptyWord, CudaFullWord
from equipoise.backends.devices.vendor import Device

MAPPED = 1 << 40
"""What the driver adds to a host address: a device may see it elsewhere."""


class Scribe:
    """The driver's functions, as a list of what was called."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ="equal")
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT="ordered")
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0
        self.mode = "global"

    def CUstream(self, handle: int) -> int:
        return handle

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        self.mode, before = mode, self.mode
        return 0, before

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return self.status, address + MAPPED

    def cuStreamWaitValue32(self, *given: Any) -> tuple[int]:
        self.calls.append(("wait", *given))
        return (self.status,)

    def cuStreamWriteValue32(self, *given: Any) -> tuple[int]:
        self.calls.append(("write", *given))
        return (self.status,)


@pytest.fixture
def scribe(monkeypatch: pytest.MonkeyPatch) -> Scribe:
    made = Scribe()
    monkeypatch.setattr(native, "driver", lambda: made)
    monkeypatch.setattr(native, "stream_memory", lambda: "")
    monkeypatch.setattr(word, "bind", lambda device: None)
    monkeypatch.setattr(word, "pinned", lambda nbytes: torch.ones(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(word, "_shelves", {})
    return made


DEVICE = Device(native, 0)
STREAM = SimpleNamespace(cuda_stream=77)


def test_an_acquire_waits_for_one_and_then_writes_zero(scribe: Scribe) -> None:
    full = CudaFullWord(DEVICE)
    full.wait(STREAM)
    (kind, stream, place, value, how), (kind2, stream2, place2, value2, how2) = scribe.calls
    assert (kind, stream, value, how) == ("wait", 77, 1, "equal")
    assert (kind2, stream2, value2, how2) == ("write", 77, 0, "ordered")
    assert place == place2 == full._word._address


def test_a_signal_is_a_store_and_no_call_of_the_driver(scribe: Scribe) -> None:
    full = CudaFullWord(DEVICE)
    full.give()
    assert full._word.value == 1
    assert scribe.calls == []


def test_a_release_is_a_write_of_the_stream_that_the_host_reads(scribe: Scribe) -> None:
    empty = CudaEmptyWord(DEVICE)
    empty.set(STREAM)
    assert [(call[0], call[3]) for call in scribe.calls] == [("write", 1)]
    assert not empty.is_set()
    empty._word.store(1)  # as the device would
    assert empty.is_set()
    empty.clear()
    assert not empty.is_set()


def test_no_word_is_handed_out_twice_and_all_begin_at_zero(scribe: Scribe) -> None:
    shelf = Shelf(DEVICE)
    words = [shelf.take() for _ in range(PAGE + 2)]
    assert len({made._address for made in words}) == len(words)
    assert all(made.value == 0 for made in words)
    for number, made in enumerate(words):
        made.store(number)
    assert [made.value for made in words] == list(range(len(words)))


def test_every_word_is_alone_on_its_line_and_where_the_device_finds_it(scribe: Scribe) -> None:
    shelf = Shelf(DEVICE)
    words = [shelf.take() for _ in range(PAGE)]
    (page,) = shelf._pages
    begin = page.data_ptr() + MAPPED
    assert sorted(made._address - begin for made in words) == [LINE * n for n in range(PAGE)]
    for made in words:
        assert made._cell.__array_interface__["data"][0] + MAPPED == made._address


def test_the_memory_of_words_outlives_their_locks(scribe: Scribe) -> None:
    """A stream writes what it was told to, also when its lock is forgotten."""
    first = word.shelf(DEVICE)
    CudaFullWord(DEVICE)
    assert word.shelf(DEVICE) is first
    assert len(first._pages) == 1


def test_page_locked_memory_is_made_where_a_capture_would_forbid_it(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def pinned(nbytes: int) -> torch.Tensor:
        seen.append(scribe.mode)
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(word, "pinned", pinned)
    Shelf(DEVICE).take()
    assert seen == ["relaxed"]
    assert scribe.mode == "global"


def test_a_setting_that_forbids_locks_forbids_no_allocation_in_a_capture(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is relaxed wherever there are bindings, whatever streams can wait for."""
    monkeypatch.setattr(native, "stream_memory", lambda: "CUDA_LAUNCH_BLOCKING=1 is set")
    with native.unrestricted():
        assert scribe.mode == "relaxed"
    assert scribe.mode == "global"


def test_what_the_driver_refuses_is_told_by_name(scribe: Scribe) -> None:
    made = Shelf(DEVICE).take()
    scribe.status = 801
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32: 801"):
        made.enqueue_wait(STREAM, 1)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32: 801"):
        made.enqueue_write(STREAM, 1)


def test_a_word_is_read_where_the_host_wrote_it() -> None:
    memory = torch.zeros(4, dtype=torch.int32)
    made = Word(memory.numpy()[1:], 0)
    made.store(5)
    assert memory.tolist() == [0, 5, 0, 0]
    assert made.value == 5


class Contexts(Scribe):
    """A driver that knows which context the calling thread has."""

    def __init__(self) -> None:
        super().__init__()
        self.context = 0

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.context

    def cuDeviceGet(self, index: int) -> tuple[int, str]:
        return 0, f"device {index}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[int, int]:
        self.calls.append(("retain", device))
        return 0, 5

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        self.context = context
        return (0,)


def test_a_thread_without_a_context_is_given_the_devices_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the device is asked nothing: it may hang, and then the answer would too."""
    known = Contexts()
    monkeypatch.setattr(native, "driver", lambda: known)
    for _ in range(2):
        native.give_context(3)
    assert known.context == 5
    assert known.calls == [("retain", "device 3")]
