"""From a model's tensors to slot stores: which bytes move, and what is refused."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.strategies.expert_tensors import KINDS, Part, raw, tensors_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancer.experts.weights.expert_weights import ExpertModel, SlotTensors
from equipoise.balancer.experts.weights.registry import ModelRegistry, RegistryFinalized
from equipoise.hal import registry as backends
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import PlacementError, RegistrationError
from equipoise.hal.stream import Role

SECONDS = 20.0
Layer = dict[str, SlotTensors]


@pytest.fixture(scope="module")
def device() -> Accelerator:
    return backends.accelerator("cpu").open(0)


def named_tensors(layers: dict[int, Layer]) -> list[tuple[str, Tensor]]:
    return [
        (f"layers.{number}.{name}.{slot}", tensor)
        for number, layer in layers.items()
        for name, slot_tensors in layer.items()
        for slot, tensor in enumerate(tensors_of(slot_tensors))
    ]


def finalized_model(
    layers: dict[int, Layer], slots: int, experts: int = 7, order: Sequence[int] = ()
) -> ExpertModel:
    registry = ModelRegistry("m", slots, experts)
    for number in order or layers:
        registry.register(number, layers[number])
    return registry.finalize(named_tensors(layers))


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[int, Layer], int]:
    """Layers of one to three kinds, by the model's own numbers in any order, and slots a rank."""
    kinds: list[list[Part]] = draw(st.lists(KINDS, min_size=1, max_size=3))
    slots = draw(st.integers(1, 3))
    numbers = draw(st.lists(st.integers(0, 90), min_size=1, max_size=5, unique=True))
    layers = {}
    for number in numbers:
        kind = draw(st.permutations(draw(st.sampled_from(kinds))))
        layers[number] = {part.name: part.make(slots) for part in kind}
    return layers, slots


def fill(layers: dict[int, Layer], seed: int) -> None:
    """Random bytes in every slot, in place."""
    noise = random.Random(seed)
    for layer in layers.values():
        for form in layer.values():
            for tensor in tensors_of(form):
                words = torch.frombuffer(
                    bytearray(noise.randbytes(tensor.nbytes)), dtype=torch.uint8
                )
                if tensor.dtype is torch.bool:
                    words %= 2
                tensor.copy_(words.view(tensor.dtype).view(tensor.shape))


def slot_bytes(layers: dict[int, Layer], number: int, slot: int) -> dict[str, bytes]:
    return {
        name: raw(tensors_of(slot_tensors)[slot]) for name, slot_tensors in layers[number].items()
    }


@given(models(), st.integers(0, 2**32), st.data())
def test_registered_slot_move_copies_exactly_its_expert(
    device: Accelerator, case: tuple[dict[int, Layer], int], seed: int, data: st.DataObject
) -> None:
    layers, slots = case
    model = finalized_model(layers, slots)
    fill(layers, seed)
    before = {(n, s): slot_bytes(layers, n, s) for n in layers for s in range(slots)}
    copy = device.stream(Role.COPY)
    for number, family in enumerate(model.groups):
        store = device.slot_store(family.layout(staging=1))
        pair = st.tuples(st.sampled_from(family.layers), st.integers(0, slots - 1))
        source, target = data.draw(pair), data.draw(pair)
        blob = torch.zeros(family.slot_bytes, dtype=torch.uint8)
        places = [model.locate(*source), model.locate(*target)]
        assert [place.group for place in places] == [number, number]
        store.pack([places[0].number], blob, copy)
        store.unpack(blob, [0], copy)
        store.commit([(0, places[1].number)], copy)
        copy.synchronize(SECONDS)
        (one, a), (two, b) = source, target
        before[model.layer_numbers[two], b] = before[model.layer_numbers[one], a]
    assert {(n, s): slot_bytes(layers, n, s) for n in layers for s in range(slots)} == before


@given(models())
def test_expert_model_locates_every_slot_of_every_layer_once(
    case: tuple[dict[int, Layer], int],
) -> None:
    layers, slots = case
    model = finalized_model(layers, slots)
    assert model.layer_numbers == tuple(sorted(layers))
    assert [model.layer(number) for number in model.layer_numbers] == list(range(model.layers))
    places = [model.locate(layer, slot) for layer in range(model.layers) for slot in range(slots)]
    assert {(place.group, place.number) for place in places} == {
        (number, slot)
        for number, family in enumerate(model.groups)
        for slot in range(len(family.slots))
    }
    for layer in range(model.layers):
        for slot in range(slots):
            place = model.locate(layer, slot)
            segments = model.groups[place.group].slots[place.number]
            layer_tensors = layers[model.layer_numbers[layer]]
            assert [segment.name for segment in segments] == sorted(layer_tensors)
            for segment in segments:
                tensor = tensors_of(layer_tensors[segment.name])[slot]
                assert segment.data.data_ptr() == tensor.data_ptr()


@given(models(), st.randoms())
def test_expert_model_ignores_order_of_registration(
    case: tuple[dict[int, Layer], int], chance: random.Random
) -> None:
    layers, slots = case
    order = sorted(layers)
    chance.shuffle(order)
    one = finalized_model(layers, slots)
    two = finalized_model({n: dict(reversed(layers[n].items())) for n in order}, slots, order=order)
    assert (one.digest, one.describe()) == (two.digest, two.describe())


@given(models())
def test_expert_model_bytes_equal_tensor_bytes(case: tuple[dict[int, Layer], int]) -> None:
    layers, slots = case
    model = finalized_model(layers, slots)
    assert model.nbytes == sum(tensor.nbytes for _, tensor in named_tensors(layers))
    for family in model.groups:
        assert family.nbytes == family.slot_bytes * slots * len(family.layers)
        assert family.layout(2).slot_bytes == family.slot_bytes
        assert family.layout(2).descriptor == family.descriptor


@given(models(), st.integers(0, 2**32))
def test_expert_written_from_sources_matches_model(
    device: Accelerator, case: tuple[dict[int, Layer], int], seed: int
) -> None:
    layers, slots = case
    model = finalized_model(layers, slots)
    fill(layers, seed)
    compute = device.stream(Role.COMPUTE)
    for family in model.groups:
        layer = layers[model.layer_numbers[family.layers[0]]]
        expert = {
            name: tensors_of(slot_tensors)[0].clone(memory_format=torch.contiguous_format)
            for name, slot_tensors in layer.items()
        }
        expected = slot_bytes(layers, model.layer_numbers[family.layers[0]], 0)
        store = device.slot_store(family.layout(staging=0))
        store.write([len(family.slots) - 1], [family.sources(expert)], compute)
        compute.synchronize(SECONDS)
        assert slot_bytes(layers, model.layer_numbers[family.layers[-1]], slots - 1) == expected


def test_layer_group_sources_refuse_other_tensor_names() -> None:
    model = finalized_model({0: {"w": torch.zeros(2, 3)}}, 2)
    with pytest.raises(RegistrationError, match=r"an expert has \['w'\], got \['v'\]"):
        model.groups[0].sources({"v": torch.zeros(3)})


def test_expert_model_groups_layers_of_equal_dtypes_into_layer_groups() -> None:
    plain_layers: dict[int, Layer] = {
        n: {"w": torch.zeros(2, 3, dtype=torch.bfloat16)} for n in (3, 4)
    }
    packed_layers: dict[int, Layer] = {
        n: {"w": torch.zeros(2, 3, dtype=torch.uint8), "scale": torch.zeros(2)} for n in (5, 6, 8)
    }
    model = finalized_model({**packed_layers, **plain_layers}, 2)
    assert [family.layers for family in model.groups] == [(0, 1), (2, 3, 4)]
    assert [family.slot_bytes for family in model.groups] == [6, 3 + 4]
    assert model.describe().splitlines() == [
        "m: layer group 0: layers 3..4, 4 slots of 6 bytes: w bfloat16 [3]",
        "m: layer group 1: layers 5..6, 8, 6 slots of 7 bytes: scale float32 [], w uint8 [3]",
    ]


def test_expert_model_separates_layers_of_different_memory_order() -> None:
    square = torch.zeros(2, 3, 3)
    transposed = torch.zeros(2, 3, 3).transpose(1, 2)
    model = finalized_model({0: {"w": square}, 1: {"w": transposed}}, 2)
    assert [family.layers for family in model.groups] == [(0,), (1,)]
    assert model.groups[0].descriptor == model.groups[1].descriptor
    other = finalized_model({0: {"w": transposed}, 1: {"w": square}}, 2)
    assert model.digest != other.digest


@pytest.mark.parametrize(
    "other",
    [
        {0: {"w": torch.zeros(2, 3)}, 2: {"w": torch.zeros(2, 3)}},
        {0: {"w": torch.zeros(2, 3)}, 1: {"w": torch.zeros(2, 4)}},
        {0: {"w": torch.zeros(2, 3)}, 1: {"w": torch.zeros(2, 3, dtype=torch.int32)}},
        {0: {"w": torch.zeros(2, 3)}, 1: {"v": torch.zeros(2, 3)}},
        {0: {"w": torch.zeros(2, 3)}},
    ],
)
def test_expert_model_digest_differs_when_slots_cannot_be_exchanged(
    other: dict[int, Layer],
) -> None:
    def reference_model() -> ExpertModel:
        return finalized_model({0: {"w": torch.zeros(2, 3)}, 1: {"w": torch.zeros(2, 3)}}, 2)

    assert reference_model().digest == reference_model().digest
    assert reference_model().digest != finalized_model(other, 2).digest
    assert reference_model().digest != finalized_model({0: {"w": torch.zeros(1, 3)}}, 1).digest


def test_registry_recognizes_repeated_layer() -> None:
    weights, scales, others = torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3)
    registry = ModelRegistry("m", 2, 7)
    registry.register(60, w=weights, scale=scales)
    registry.register(61, w=others)
    registry.register(62, scale=scales, w=list(weights))
    model = registry.finalize([("w", weights), ("scale", scales), ("others", others)])
    assert (model.layer_numbers, dict(model.repeats)) == ((60, 61), {62: 60})
    assert model.layer(62) == model.layer(60) == 0
    assert model.nbytes == weights.nbytes + scales.nbytes + others.nbytes
    assert model.describe().splitlines()[-1] == "m: layer 62 repeats layer 60"


def test_registry_adds_up_entries_of_repeated_layers() -> None:
    weights, others = torch.zeros(2, 3), torch.zeros(2, 3)

    def model_with_entries(entries: int) -> ExpertModel:
        registry = ModelRegistry("m", 2, 7)
        registry.register(62, w=weights)
        registry.register(61, w=others, entries=entries)
        registry.register(60, w=weights, entries=3)
        return registry.finalize([("w", weights), ("others", others)])

    assert model_with_entries(2).entries_per_step == (4, 2)
    assert model_with_entries(2).digest != model_with_entries(1).digest
    assert model_with_entries(2).digest == model_with_entries(2).digest


def test_registry_refuses_layer_without_entries() -> None:
    with pytest.raises(RegistrationError, match="'m', layer 3: a step enters it 0 times"):
        ModelRegistry("m", 2, 7).register(3, w=torch.zeros(2, 3), entries=0)


@given(st.permutations([5, 9, 61]))
def test_registry_names_repeated_layer_by_lowest_number(order: list[int]) -> None:
    weights, last = torch.zeros(2, 3), torch.zeros(2, 3)
    layers: dict[int, Layer] = {5: {"w": weights}, 9: {"w": last}, 61: {"w": weights}}
    model = finalized_model(layers, 2, order=order)
    assert (model.layer_numbers, dict(model.repeats)) == ((5, 9), {61: 5})
    assert [model.layer(number) for number in (5, 9, 61)] == [0, 1, 0]


def test_registry_refuses_layer_that_shares_part_of_another() -> None:
    shared_weights, scale = torch.zeros(2, 3), torch.zeros(2)
    registry = ModelRegistry("m", 2, 7)
    registry.register(1, w=shared_weights, scale=scale)
    message = "layer 2, tensor 'w': slot 0 shares memory with layer 1, tensor 'w', slot 0"
    with pytest.raises(RegistrationError, match=message):
        registry.register(2, w=shared_weights, scale=torch.zeros(2))
    with pytest.raises(RegistrationError, match="layer 2, tensor 'w': slot 0 shares memory"):
        registry.register(2, w=[shared_weights[0], torch.zeros(3)], scale=torch.zeros(2))
    # Whichever lies first in memory is named.
    with pytest.raises(RegistrationError, match=r"layer 2, tensor '(w|scale)': slot 0 shares"):
        registry.register(2, w=shared_weights.view(torch.int32), scale=scale)
    other_weights = torch.zeros(2, 3)
    registry.register(3, a=other_weights, b=torch.zeros(2))
    with pytest.raises(RegistrationError, match="layer 4, tensor 'a': slot 0 shares memory"):
        registry.register(4, a=other_weights, b=torch.zeros(2))
    with pytest.raises(RegistrationError, match="layer 2, tensor 'v': slot 0 shares memory"):
        registry.register(2, v=shared_weights)
    with pytest.raises(RegistrationError, match="shares memory"):
        registry.register(2, w=list(reversed(list(shared_weights))), scale=torch.zeros(2))
    registry.register(2, w=torch.zeros(2, 3))


def test_registry_keeps_nothing_of_refused_layer() -> None:
    registry = ModelRegistry("m", 2, 7)
    good = torch.zeros(2, 3)
    with pytest.raises(RegistrationError, match="tensor 'z': stacks 3 slots"):
        registry.register(0, a=good, z=torch.zeros(3, 3))
    registry.register(1, a=good)
    assert list(registry.finalize([("a", good)]).layer_numbers) == [1]


@pytest.mark.parametrize(("slots", "experts"), [(0, 4), (4, 0), (-1, 4)])
def test_registry_refuses_counts_below_one(slots: int, experts: int) -> None:
    with pytest.raises(RegistrationError, match="must be positive"):
        ModelRegistry("m", slots, experts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m", 2.5, 8), "model 'm': slots_per_rank 2.5 is a float, not a whole number"),
        (("m", 2, "8"), "model 'm': experts '8' is a str, not a whole number"),
        ((None, 2, 8), "name must be of type str, got None"),
    ],
)
def test_registry_refuses_arguments_of_other_types(arguments: Any, message: str) -> None:
    with pytest.raises(RegistrationError) as error:
        ModelRegistry(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (torch.nn.Linear(2, 2).parameters(), "got a Parameter among them"),
        ({"w": torch.zeros(1)}, "got 'w' among them"),
        ([("w", 3)], "got 3 for 'w'"),
        (None, "got None"),
    ],
)
def test_finalize_refuses_what_is_no_module_and_no_pairs(model: Any, got: str) -> None:
    registry = ModelRegistry("m", 1, 1)
    registry.register(0, w=torch.zeros(1, 2))
    with pytest.raises(RegistrationError) as error:
        registry.finalize(model)
    assert str(error.value) == f"model must be a module, or pairs of name and tensor, {got}"


def test_registry_refuses_layer_without_tensors_or_registered_twice() -> None:
    registry = ModelRegistry("m", 2, 7)
    with pytest.raises(RegistrationError, match="layer 4: no tensors"):
        registry.register(4)
    with pytest.raises(RegistrationError, match="layer -1 is negative"):
        registry.register(-1, w=torch.zeros(2))
    with pytest.raises(RegistrationError, match="layer 4, tensor 'w': is given twice"):
        registry.register(4, {"w": torch.zeros(2)}, w=torch.zeros(2))
    weights = torch.zeros(2)
    registry.register(4, {"w": weights})
    registry.register(5, w=weights)
    for number in (4, 5):
        with pytest.raises(RegistrationError, match=f"layer {number} is registered twice"):
            registry.register(number, w=torch.zeros(2))


def test_registry_refuses_registration_after_finalize() -> None:
    registry, weights = ModelRegistry("m", 2, 7), torch.zeros(2, 3)
    with pytest.raises(RegistrationError, match="no layer was registered"):
        registry.finalize([])
    registry.register(0, w=weights)
    model = registry.finalize([("w", weights)])
    assert registry.state == RegistryFinalized(model)
    with pytest.raises(RegistrationError, match="'m' is finalized: too late to register layer 1"):
        registry.register(1, w=torch.zeros(2, 3))
    with pytest.raises(RegistrationError, match="'m' is finalized: too late to finalize"):
        registry.finalize([("w", weights)])


def test_expert_model_refuses_missing_layer_or_slot() -> None:
    model = finalized_model({3: {"w": torch.zeros(2, 3)}}, 2)
    with pytest.raises(RegistrationError, match="'m' has no layer 0"):
        model.layer(0)
    for layer, slot in ((1, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(PlacementError, match=f"no slot {slot} in layer {layer}"):
            model.locate(layer, slot)


def test_expert_model_knows_shape_of_its_placements() -> None:
    model = finalized_model({3: {"w": torch.zeros(2, 3)}, 9: {"w": torch.zeros(2, 3)}}, 2)
    shape = model.shape(ranks=4)
    assert (shape.layers, shape.experts, shape.slots, shape.slots_per_rank) == (2, 7, 8, 2)
    with pytest.raises(PlacementError, match="6 slots cannot hold 7 experts"):
        model.shape(ranks=3)


@pytest.mark.parametrize(
    ("layer", "entries", "message"),
    [
        ("3", 1, "model 'm': layer '3' is a str, not a whole number"),
        (None, 1, "model 'm': layer None is a NoneType, not a whole number"),
        (3.0, 1, "model 'm': layer 3.0 is a float, not a whole number"),
        (True, 1, "model 'm': layer True is a bool, not a whole number"),
        (3, "2", "model 'm': entries '2' is a str, not a whole number"),
    ],
)
def test_registry_refuses_non_integer_numbers(layer: Any, entries: Any, message: str) -> None:
    registry = ModelRegistry("m", 2, 4)
    with pytest.raises(RegistrationError, match=message):
        registry.register(layer, w=torch.zeros(2, 3), entries=entries)
    registry.register(3, w=torch.zeros(2, 3))


def test_registry_accepts_integers_of_other_libraries() -> None:
    registry, weights = ModelRegistry("m", 2, 4), torch.zeros(2, 3)
    registry.register(torch.tensor(3), w=weights)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="layer 3 is registered twice"):
        registry.register(3, w=weights)


def test_registry_refuses_values_that_are_no_tensors() -> None:
    registry: Any = ModelRegistry("m", 2, 4)
    message = "model 'm', layer 3, tensor 'w': is a NoneType, neither a tensor nor one a slot"
    with pytest.raises(RegistrationError, match=message):
        registry.register(3, w=None)
    with pytest.raises(RegistrationError, match="layer 3: tensors are a NoneType, not a mapping"):
        registry.register(3, None)
    registry.register(3, w=torch.zeros(2, 3))
