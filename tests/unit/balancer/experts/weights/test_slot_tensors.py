"""Which tensors can be slots, and what is said of those that cannot."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.balancer.experts.weights.expert_weights import (
    FormatOf,
    SlotTensors,
    is_on_device,
    memory_order,
    strided,
)
from equipoise.balancer.experts.weights.registry import ModelRegistry, RegistryOpen
from equipoise.hal import registry as backends
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import RegistrationError
from equipoise.hal.stream import Role

SECONDS = 20.0
SHARED = torch.zeros(3, 4)


def refusal(
    slot_tensors: SlotTensors, device: torch.device | None = None, format_of: FormatOf = strided
) -> str:
    registry = ModelRegistry("m", 2, 7, device=device, format_of=format_of)
    with pytest.raises(RegistrationError) as error:
        registry.register(3, w=slot_tensors)
    assert isinstance(registry.state, RegistryOpen)
    assert not registry.state.layers
    message = str(error.value)
    assert message.startswith("model 'm', layer 3, tensor 'w': ")
    assert "\n" not in message
    return message.split(": ", 1)[1]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (torch.zeros(3, 4), "stacks 3 slots, a rank has 2"),
        (torch.tensor(1.0), "is one number, not one for each of 2 slots"),
        ([torch.zeros(4)], "has 1 tensors, a rank has 2 slots"),
        ([torch.zeros(4), 3], "slot 1 is a int, not a tensor"),
        (torch.zeros(1, 4).expand(2, 4), "is expanded: all its slots are the same memory"),
        (torch.zeros(2, 1).expand(2, 4), "a slot of shape [4] and strides [0] is not dense"),
        (torch.zeros(2, 8)[:, ::2], "a slot of shape [4] and strides [2] is not dense"),
        (torch.zeros(5).as_strided((2, 4), (1, 1)), "slot 1 shares memory with layer 3"),
        ([SHARED[0], SHARED[0]], "slot 1 shares memory with layer 3, tensor 'w', slot 0"),
        ([torch.zeros(4), torch.zeros(5)], "slot 1 is of shape [5], slot 0 of shape [4]"),
        (
            [torch.zeros(4), torch.zeros(4, dtype=torch.int32)],
            "slot 1 is of torch.int32, slot 0 of torch.float32",
        ),
        (
            [torch.zeros(3, 3), torch.zeros(3, 3).t()],
            "slot 1 is in memory order (1, 0), slot 0 in memory order (0, 1)",
        ),
        (
            [torch.zeros(4), torch.zeros(4, device="meta")],
            "slot 1 is on meta, slot 0 on cpu",
        ),
        ([torch.zeros(4, device="meta")] * 2, "has no memory yet"),
        (torch.zeros(2, 4, device="meta"), "has no memory yet"),
        (nn.UninitializedParameter(), "has no memory yet"),
        (torch.zeros(2, 0), "of shape [2, 0] holds nothing; leave it out"),
        (torch.zeros(2, 4).to_sparse(), "is torch.sparse_coo of torch.float32"),
        (torch.zeros(2, 4, dtype=torch.complex64).conj(), "is a lazy conjugate or negative"),
        (nn.Parameter(torch.zeros(2, 4)) * 2, "is the result of a computation"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_register_refuses_unusable_tensors(tensors: SlotTensors, message: str) -> None:
    assert message in refusal(tensors)


def test_register_refuses_wrapper_subclass() -> None:
    class Wrapper(Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

    assert "is a Wrapper; register the tensors" in refusal(torch.zeros(2, 4).as_subclass(Wrapper))


def test_register_refuses_weights_on_another_device() -> None:
    message = refusal(torch.zeros(2, 4), device=torch.device("cuda", 1))
    assert message == "is on cpu, the model's experts are on cuda:1"
    registry = ModelRegistry("m", 2, 7, device=torch.device("cpu"))
    registry.register(0, w=torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("actual", "required", "fits"),
    [
        ("cuda:1", "cuda:1", True),
        ("cuda:1", "cuda", True),
        ("cuda:1", "cuda:0", False),
        ("cpu", "cuda", False),
        ("cpu", "cpu", True),
    ],
)
def test_device_match_ignores_index_when_none_is_given(
    actual: str, required: str, fits: bool
) -> None:
    assert is_on_device(torch.device(actual), torch.device(required)) is fits


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_memory_order_ignores_strides_of_size_one_dimensions(
    order: list[int], shape: list[int]
) -> None:
    memory = torch.zeros(shape)
    permuted = memory.permute(order)
    assert permuted.permute(memory_order(permuted)).is_contiguous()
    odd_strides = [
        7 if extent == 1 else step
        for extent, step in zip(permuted.shape, permuted.stride(), strict=True)
    ]
    assert memory_order(memory.as_strided(permuted.shape, odd_strides)) == memory_order(permuted)


def test_register_detaches_parameters_that_require_grad() -> None:
    stacked_parameter, slot_parameters = (
        nn.Parameter(torch.zeros(2, 3)),
        [nn.Parameter(torch.zeros(3)) for _ in "ab"],
    )
    registry = ModelRegistry("m", 2, 7)
    registry.register(
        0,
        stacked=stacked_parameter,
        each=slot_parameters,
        viewed=nn.Parameter(torch.zeros(6)).view(2, 3),
    )
    assert isinstance(registry.state, RegistryOpen)
    segments = [s for slot in registry.state.layers[0].slots for s in slot]
    assert not any(segment.data.requires_grad for segment in segments)
    segments[0].data.fill_(1)
    assert slot_parameters[0].tolist() == [1, 1, 1]


def test_register_in_inference_mode_allows_later_writes() -> None:
    plain_tensor = torch.zeros(2, 3)
    with torch.inference_mode():
        inference_tensor = torch.zeros(2, 3)
        registry = ModelRegistry("m", 2, 7)
        registry.register(0, born=inference_tensor, plain=plain_tensor)
        model = registry.finalize([("born", inference_tensor), ("plain", plain_tensor)])
    for slot in model.groups[0].slots:
        for segment in slot:
            segment.data.fill_(2)
    assert {*inference_tensor.flatten().tolist(), *plain_tensor.flatten().tolist()} == {2}


def test_register_refuses_unsuitable_private_tensors() -> None:
    def private_format(tensor: Tensor) -> SlotFormat:
        return SlotFormat.PRIVATE

    assert "is stacked in a private format" in refusal(torch.zeros(2, 4), format_of=private_format)
    rows = torch.zeros(2, 4)
    assert "needs storage offset 0" in refusal([torch.zeros(4), rows[1]], format_of=private_format)
    assert "shares memory" in refusal([rows[0], rows.view(8)[:4]], format_of=private_format)
    assert "padding=4" in refusal([torch.zeros(4), torch.zeros(5)[:4]], format_of=private_format)


def test_private_slot_moves_with_its_padding() -> None:
    accelerator = backends.accelerator("virtual").open(0)
    padded_slots = [accelerator.empty_private((4,), torch.int16) for _ in range(2)]
    scales = torch.zeros(2, 1, 1)
    registry = ModelRegistry("m", 2, 7, format_of=_private_if_flat)
    registry.register(0, w=padded_slots, scale=scales)
    (family,) = registry.finalize([*zip("ab", padded_slots, strict=True), ("s", scales)]).groups
    store, stream = accelerator.slot_store(family.layout(1)), accelerator.stream(Role.COPY)
    accelerator.storage_bytes(padded_slots[0]).fill_(7)
    blob = torch.zeros(family.slot_bytes, dtype=torch.uint8)
    store.pack([0], blob, stream)
    store.unpack(blob, [0], stream)
    store.commit([(0, 1)], stream)
    stream.synchronize(SECONDS)
    assert family.slot_bytes > padded_slots[0].nbytes + 4
    assert set(accelerator.storage_bytes(padded_slots[1]).tolist()) == {7}
    accelerator.close()


def _private_if_flat(tensor: Tensor) -> SlotFormat:
    return SlotFormat.PRIVATE if tensor.dim() == 1 else SlotFormat.STRIDED
