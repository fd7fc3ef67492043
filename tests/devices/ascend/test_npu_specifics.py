"""What only NPUs have: private formats, streams that torch_npu cannot handle, its task queue."""

import pytest
import torch
from helpers.harnesses.devices import current_stream
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.ascend import BACKEND, byte_ops, npu_runtime
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import SlotError, Unsupported
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SLOTS = 3


def settled(npu: AscendAccelerator) -> None:
    current_stream(npu).synchronize()


def nz(npu: AscendAccelerator, number: int) -> Tensor:
    """A padded matrix, every byte of it `number`, padding included."""
    matrix = npu.empty_private((20, 24), torch.float16)
    npu.storage_bytes(matrix).fill_(number)
    settled(npu)
    return matrix


def test_slot_store_moves_private_format_with_padding(npu: AscendAccelerator) -> None:
    tensors = [nz(npu, number) for number in range(SLOTS)]
    slots = tuple((Segment("w", tensor, SlotFormat.PRIVATE),) for tensor in tensors)
    store, stream = npu.slot_store(SlotLayout(slots, staging=1)), npu.stream(Role.COPY)
    size = store.layout.slot_bytes
    assert size == tensors[0].untyped_storage().nbytes() > tensors[0].nbytes
    blob = torch.empty(size, dtype=torch.uint8, device=npu.device)
    store.pack([2], blob, stream)
    store.unpack(blob, [0], stream)
    store.commit([(0, 0)], stream)
    store.write([1], [[nz(npu, 77)]], stream)
    stream.synchronize(WATCHDOG)
    assert [set(npu.storage_bytes(tensor).tolist()) for tensor in tensors] == [{2}, {77}, {2}]
    assert all(byte_ops.is_private(tensor) for tensor in tensors)
    assert store.conversions == 0


def test_slot_store_refuses_private_tensor_as_strided(npu: AscendAccelerator) -> None:
    layout = SlotLayout(((Segment("w", nz(npu, 1)),),), staging=0)
    with pytest.raises(SlotError, match="private format"):
        npu.slot_store(layout)


def test_private_format_refuses_vectors(npu: AscendAccelerator) -> None:
    with pytest.raises(Unsupported, match="matrices"):
        npu.empty_private((24,), torch.float16)


def test_graph_unsupported_with_task_queue_level_2(
    npu: AscendAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(Unsupported, match="TASK_QUEUE_ENABLE=2"):
        npu.graph()


def test_adopt_refuses_external_and_other_device_streams(npu: AscendAccelerator) -> None:
    pointer = npu.stream(Role.COMPUTE).native_stream.npu_stream
    external = npu_runtime.npu().ExternalStream(pointer, device=0)
    with pytest.raises(Unsupported):
        npu.adopt(external)
    if BACKEND.devices() > 1:
        with pytest.raises(Unsupported, match="npu:0"):
            npu.adopt(npu_runtime.npu().Stream(device=1))
