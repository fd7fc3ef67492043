"""The registry: an integration registers the tensors of its model that are expert weights.

    registry = ModelRegistry("target", slots_per_rank=9, experts=256)
    registry.register(3, w13=layer.w13, w13_scale=layer.w13_scale, w2=[e.w2 for e in experts])
    model = registry.finalize(module, ignore={"*.gate.*": "the router's, by logical expert"})

Only registered tensors move. If a tensor of an expert is missing, it stays behind, and outputs are
wrong from the first rebalance on, not before (TensorRT-LLM, PR 13856: a scalar per expert). So
`finalize` compares the registered tensors with all tensors of the model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from types import MappingProxyType

import torch
from torch import Tensor, nn

from equipoise.balancer.experts.weights.completeness import (
    ExpertCounts,
    check_complete,
    model_tensors,
)
from equipoise.balancer.experts.weights.expert_weights import (
    ExpertModel,
    FormatOf,
    LayerTensors,
    SlotTensor,
    SlotTensors,
    TensorName,
    is_on_device,
    layer_groups,
    slot_tensor,
    strided,
)
from equipoise.balancer.experts.weights.memory_spans import MemorySpan, OwnedSpan, SpanIndex
from equipoise.hal.arguments import check_type
from equipoise.hal.errors import RegistrationError


@dataclass(frozen=True)
class RegistryOpen:
    """Layers may still be registered.

    Attributes:
        layers: layers by number, without repeats.
        repeats: number of each repeat, mapped to the layer whose memory it shares.
        entries: how often a step enters each number, repeats included.
        spans: memory of all layers.
    """

    layers: Mapping[int, LayerTensors] = field(default_factory=dict)
    repeats: Mapping[int, int] = field(default_factory=dict)
    entries: Mapping[int, int] = field(default_factory=dict)
    spans: SpanIndex = field(default_factory=SpanIndex)


@dataclass(frozen=True)
class RegistryFinalized:
    """All tensors are registered, and the check for completeness has passed."""

    model: ExpertModel


class ModelRegistry:
    """Collects the expert weights of one model on this rank. Not thread-safe.

    Args:
        name: name of the model, unique among those of one engine.
        slots_per_rank: slots of this rank in each layer.
        experts: logical experts per layer, over all ranks.
        device: device that the weights must be on; None for that of the first registered tensor.
        format_of: returns which tensors are in a private format.

    Raises:
        RegistrationError: a number is below one or not whole, or the name is no text.
    """

    def __init__(
        self,
        name: str,
        slots_per_rank: int,
        experts: int,
        *,
        device: torch.device | None = None,
        format_of: FormatOf = strided,
    ) -> None:
        check_type("name", name, str, RegistrationError)
        slots_per_rank = _parse_integer(f"model {name!r}: slots_per_rank", slots_per_rank)
        experts = _parse_integer(f"model {name!r}: experts", experts)
        if min(slots_per_rank, experts) < 1:
            raise RegistrationError(
                f"model {name!r}: slots_per_rank {slots_per_rank} and experts {experts} "
                "must be positive"
            )
        self._name = name
        self._expert_counts = ExpertCounts(slots_per_rank, experts)
        self._device = device
        self._format_of = format_of
        self._state: RegistryOpen | RegistryFinalized = RegistryOpen()

    @property
    def state(self) -> RegistryOpen | RegistryFinalized:
        """The state of the registry."""
        return self._state

    def register(
        self,
        layer: int,
        tensors: Mapping[str, SlotTensors] = MappingProxyType({}),
        /,
        *,
        entries: int = 1,
        **named: SlotTensors,
    ) -> None:
        """Registers the tensors of a layer's experts: all that an expert has, scales included.

        A layer whose tensors are all those of an earlier one is a *repeat* of it: a module that
        runs twice in a step under two numbers, or weights that two layers share. Both have the same
        row of the placement, so that they move together.

        Args:
            layer: the model's own layer number.
            tensors: tensors by name; each stacked [slots_per_rank, ...], or a sequence with one
                tensor per slot.
            entries: how often every step enters the layer under this number; each entry is a call
                of `ModelBalancer.reading_slots`.
            named: further tensors, for names that are identifiers.

        Raises:
            RegistrationError: the error names layer and tensor; nothing is registered then.
        """
        state = self._open(f"register layer {layer}")
        layer, entries = (
            _parse_integer(f"model {self._name!r}: {field}", number)
            for field, number in (("layer", layer), ("entries", entries))
        )
        self._check_numbers(layer, entries, state)
        merged = self._merge_tensors(layer, tensors, named)
        columns = tuple(self._slot_tensor(layer, name, value) for name, value in merged)
        device = self._common_device(columns)
        added = _add_layer(state, LayerTensors(layer, columns))
        # Assigned last: a tensor that is refused leaves the registry as it was.
        self._state = replace(added, entries={**state.entries, layer: entries})
        self._device = device

    def _merge_tensors(
        self, layer: int, tensors: Mapping[str, SlotTensors], named: Mapping[str, SlotTensors]
    ) -> list[tuple[str, SlotTensors]]:
        """Returns the tensors of both arguments, sorted by name."""
        if not isinstance(tensors, Mapping):
            kind = type(tensors).__name__
            raise RegistrationError(
                f"model {self._name!r}, layer {layer}: tensors are a {kind}, not a mapping"
            )
        twice = sorted(set(tensors) & set(named))
        if twice:
            raise TensorName(self._name, layer, twice[0]).error("is given twice")
        merged = sorted({**tensors, **named}.items())
        if not merged:
            raise RegistrationError(f"model {self._name!r}, layer {layer}: no tensors")
        return merged

    def finalize(
        self,
        model: nn.Module | Iterable[tuple[str, Tensor]],
        ignore: Mapping[str, str] = MappingProxyType({}),
    ) -> ExpertModel:
        """Checks that every tensor of an expert is registered, and closes the registry.

        Args:
            model: the module, or pairs of name and tensor; see `model_tensors`.
            ignore: shell patterns of names that need not move, each with the reason.

        Raises:
            ModelIncomplete: the error names everything that is missing; the registry stays open.
            RegistrationError: no layer was registered, a reason is empty, or `model` is neither a
                module nor pairs.
        """
        state = self._open("finalize")
        if not state.layers:
            raise RegistrationError(f"model {self._name!r}: no layer was registered")
        notes = check_complete(
            self._name, model_tensors(model), state.spans, self._expert_counts, ignore
        )
        expert_model = self._build_model(state, notes)
        self._state = RegistryFinalized(expert_model)
        return expert_model

    def _open(self, action: str) -> RegistryOpen:
        if isinstance(self._state, RegistryFinalized):
            raise RegistrationError(f"model {self._name!r} is finalized: too late to {action}")
        return self._state

    def _check_numbers(self, layer: int, entries: int, state: RegistryOpen) -> None:
        if layer < 0:
            raise RegistrationError(f"model {self._name!r}: layer {layer} is negative")
        if layer in state.layers or layer in state.repeats:
            raise RegistrationError(f"model {self._name!r}: layer {layer} is registered twice")
        if entries < 1:
            raise RegistrationError(
                f"model {self._name!r}, layer {layer}: a step enters it {entries} times"
            )

    def _slot_tensor(self, layer: int, name: str, tensors: SlotTensors) -> SlotTensor:
        place = TensorName(self._name, layer, name)
        return slot_tensor(place, tensors, self._expert_counts.slots_per_rank, self._format_of)

    def _common_device(self, columns: tuple[SlotTensor, ...]) -> torch.device:
        """Returns the device of all tensors; a slot store is on one device."""
        first = columns[0].device
        expected = self._device or first
        for column in columns:
            if not is_on_device(column.device, expected):
                mismatch = f"is on {column.device}, the model's experts are on {expected}"
                raise column.tensor_name.error(mismatch)
        return first

    def _build_model(self, state: RegistryOpen, notes: tuple[str, ...]) -> ExpertModel:
        """Builds the model. Rows are by number; layers that share weights count by their lowest."""
        lowest = {owner: owner for owner in state.layers}
        for repeat, owner in state.repeats.items():
            lowest[owner] = min(lowest[owner], repeat)
        owners = sorted(state.layers, key=lambda owner: lowest[owner])
        stands_for = {owner: lowest[owner] for owner in state.layers}
        stands_for |= {repeat: lowest[owner] for repeat, owner in state.repeats.items()}
        return ExpertModel(
            name=self._name,
            experts=self._expert_counts.experts,
            slots_per_rank=self._expert_counts.slots_per_rank,
            device=state.layers[owners[0]].tensors[0].device,
            layer_numbers=tuple(lowest[owner] for owner in owners),
            entries_per_step=tuple(_entries_per_step(state, owner) for owner in owners),
            repeats=MappingProxyType(
                {
                    number: owner_number
                    for number, owner_number in sorted(stands_for.items())
                    if number != owner_number
                }
            ),
            groups=layer_groups(tuple(state.layers[owner] for owner in owners)),
            notes=notes,
        )


def _parse_integer(field: str, number: object) -> int:
    """Converts any integer type to `int`. Raises `RegistrationError`."""
    try:
        if isinstance(number, bool):
            raise TypeError
        return index(number)  # type: ignore[arg-type]
    except TypeError:
        kind = type(number).__name__
        raise RegistrationError(f"{field} {number!r} is a {kind}, not a whole number") from None


def _entries_per_step(state: RegistryOpen, owner: int) -> int:
    """Returns how often a step enters the weights of a layer, under all their numbers."""
    numbers = [owner, *(repeat for repeat, original in state.repeats.items() if original == owner)]
    return sum(state.entries[number] for number in numbers)


def _add_layer(state: RegistryOpen, layer: LayerTensors) -> RegistryOpen:
    """Adds a layer to a state. Raises `RegistrationError` if it shares only some memory."""
    spans = [
        OwnedSpan(MemorySpan.of_segment(segment), column.tensor_name, slot)
        for column in layer.tensors
        for slot, segment in enumerate(column.segments)
    ]
    for claim in state.spans.overlapping(spans[0].span):
        owner = claim.tensor_name.layer
        if state.layers[owner].same_memory(layer):
            return replace(state, repeats={**state.repeats, layer.number: owner})
    return replace(
        state,
        layers={**state.layers, layer.number: layer},
        spans=state.spans.with_spans(spans),
    )
