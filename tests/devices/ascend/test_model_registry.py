"""Expert weights in the private format, registered and moved: clauses A6, A10."""

import pytest
import torch
from helpers.watchdog import WATCHDOG

from equipoise.backends.ascend import byte_ops, npu_runtime
from equipoise.backends.ascend.accelerator import AscendAccelerator
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import RegistrationError
from equipoise.hal.stream import Role


def test_registered_private_weights_move_with_padding_and_scales(
    npu: AscendAccelerator,
) -> None:
    weights = [npu.empty_private((20, 33), torch.bfloat16) for _ in range(3)]
    scales = torch.arange(3, dtype=torch.float32).to(npu.device)
    for number, one in enumerate(weights):
        npu.storage_bytes(one).fill_(number)
    npu_runtime.npu().current_stream(npu.device).synchronize()
    registry = ModelRegistry("m", 3, 8, device=npu.device, format_of=byte_ops.format_of)
    registry.register(1, w=weights, scale=scales)
    (family,) = registry.finalize([*zip("abc", weights, strict=True), ("s", scales)]).groups
    assert [kind.format for kind in family.descriptor] == [SlotFormat.STRIDED, SlotFormat.PRIVATE]
    store, copy = npu.slot_store(family.layout(staging=1)), npu.stream(Role.COPY)
    blob = torch.empty(family.slot_bytes, dtype=torch.uint8, device=npu.device)
    store.pack([2], blob, copy)
    store.unpack(blob, [0], copy)
    store.commit([(0, 0)], copy)
    copy.synchronize(WATCHDOG)
    assert [set(npu.storage_bytes(one).cpu().tolist()) for one in weights] == [{2}, {1}, {2}]
    assert (scales.cpu().tolist(), store.conversions) == ([2, 1, 2], 0)


def test_register_refuses_stacked_private_format(npu: AscendAccelerator) -> None:
    registry = ModelRegistry("m", 3, 8, format_of=byte_ops.format_of)
    with pytest.raises(RegistrationError, match="layer 1, tensor 'w': is stacked in a private for"):
        registry.register(1, w=npu.empty_private((3, 16, 32), torch.bfloat16))
