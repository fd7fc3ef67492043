"""A target of two families and a draft, without a model: slots that say what they hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from helpers.processes.thread_ranks import GroupMember
from helpers.strategies.expert_tensors import Part, tensors_of
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.context import InPlaceFromHost, StagedFromPeers, UpdatePathConfig
from equipoise.balancer.experts.model_balancer import BalancerSet
from equipoise.balancer.experts.open import (
    LayerGroupContext,
    ModelStart,
    UpdatePathFactory,
    open_balancers,
)
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.transfer.host_writes import HostWeights, StreamWriter
from equipoise.balancer.experts.weights.expert_weights import ExpertModel, SlotTensors
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.hal import registry as hal
from equipoise.hal.checksum import checksum

RANKS, EXPERTS, PER_RANK = 2, 4, 3
BUDGET = 4096


def mark(number: int, expert: int) -> int:
    """All bytes of the slots of an expert."""
    return 1 + expert + EXPERTS * number


def filled(shape: Sequence[int], dtype: torch.dtype, value: int) -> Tensor:
    """A tensor with all bytes alike."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((nbytes,), value, dtype=torch.uint8).view(dtype).view(torch.Size(shape))


Kind = tuple[Part, ...]
"""What an expert consists of."""
WIDE: Kind = (Part("w", (5,), torch.float32, "stacked"),)
SCALED: Kind = (
    Part("w", (3, 2), torch.float8_e4m3fn, "turned"),
    Part("w_scale", (), torch.float32, "each"),
)


def layer_of(kind: Kind, marks: Sequence[int]) -> dict[str, SlotTensors]:
    """Tensors of a layer by name; slot k is filled with the k-th mark."""
    tensors = {part.name: part.make(len(marks)) for part in kind}
    for slot_tensors in tensors.values():
        for tensor, value in zip(tensors_of(slot_tensors), marks, strict=True):
            memory = torch.empty(0, dtype=torch.uint8).set_(
                tensor.untyped_storage(),
                tensor.storage_offset() * tensor.itemsize,
                (tensor.nbytes,),
                (1,),
            )
            memory.fill_(value)  # copying bools would make them 0 or 1
    return tensors


@dataclass(frozen=True)
class Given:
    """A model on paper: by number, of what kind a layer is and how often a step enters it."""

    name: str
    kinds: Mapping[int, Kind]
    entries: Mapping[int, int] = field(default_factory=dict)
    shared: Mapping[int, int] = field(default_factory=dict)
    """Numbers of layers with the weights of another."""

    def model(self, rank: int, ranks: int = RANKS) -> ExpertModel:
        """Registered and finalized on a rank."""
        shape = ExpertShape(1, EXPERTS, ranks * PER_RANK, ranks)
        mine = initial_placement(shape)[0, rank * PER_RANK : (rank + 1) * PER_RANK].tolist()
        layers = {
            number: layer_of(kind, [mark(number, expert) for expert in mine])
            for number, kind in self.kinds.items()
        }
        registry = ModelRegistry(self.name, PER_RANK, EXPERTS)
        for number, tensors in layers.items():
            registry.register(number, tensors, entries=self.entries.get(number, 1))
        for number, other in self.shared.items():
            registry.register(number, layers[other])
        every = chain.from_iterable(tensors.values() for tensors in layers.values())
        return registry.finalize(
            (f"layers.{number}", tensor)
            for number, tensor in enumerate(chain.from_iterable(map(tensors_of, every)))
        )

    @property
    def visits(self) -> list[int]:
        """Numbers of layers, as one step enters them: each again and again, not at a stretch."""
        remaining = {number: self.entries.get(number, 1) for number in self.kinds}
        remaining |= dict.fromkeys(self.shared, 1)
        order = []
        while remaining:
            order += sorted(remaining)
            remaining = {number: count - 1 for number, count in remaining.items() if count > 1}
        return order


TARGET = Given("target", {3: WIDE, 4: SCALED, 6: WIDE}, shared={8: 3})
DRAFT = Given("draft", {0: WIDE}, entries={0: 3})


class Marks:
    """Weights of a family in the host's memory."""

    def __init__(self, context: LayerGroupContext) -> None:
        self._context = context

    def view(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """Every segment full of the mark."""
        value = mark(self._context.layers[layer], expert)
        return tuple(
            filled(kind.shape, kind.dtype, value) for kind in self._context.group.descriptor
        )

    def checksum(self, layer: int, expert: int) -> int:
        """Of their bytes, back to back."""
        parts = [part.reshape(-1).view(torch.uint8) for part in self.view(layer, expert)]
        return checksum(torch.cat(parts))


def staged_from_peers(context: LayerGroupContext) -> UpdatePathConfig:
    """Weights come from the peer."""
    return StagedFromPeers()


def in_place_from_host(context: LayerGroupContext) -> UpdatePathConfig:
    """Weights come from the host's memory."""
    supply = HostWeights(Marks(context), StreamWriter(context.accelerator, context.store))
    return InPlaceFromHost(supply, hal.accelerator("cpu").capabilities)


def settings(**config: Any) -> BalancerConfig:
    """Short rebalances."""
    defaults = {"shares": ShareMode.STATIC, "window_size": 2, "step_interval": 6, "sub_window": 2}
    return BalancerConfig(**{"name": "test", "timeout": WATCHDOG, **defaults, **config})


def open_all(
    member: GroupMember,
    models: Sequence[Given],
    update_path: UpdatePathFactory,
    config: BalancerConfig,
    row: Sequence[int] = (),
) -> BalancerSet:
    """Balancers of what is on paper; the slots of each layer hold `row`, or what a model gives."""
    model_set = ModelSet(
        tuple(paper_model.model(member.rank, member.size) for paper_model in models)
    )
    starts = {}
    for model in model_set:
        placement = initial_placement(model.shape(member.size))
        if row:
            placement[:] = row
        starts[model.name] = ModelStart(Layout(placement, even_shares(placement, EXPERTS)), config)
    budget = BUDGET if update_path is staged_from_peers else 0
    return open_balancers(
        member.accelerator,
        member.fabric,
        model_set,
        starts,
        staging_bytes=budget,
        update_path=update_path,
    )
