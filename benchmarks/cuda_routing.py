"""What the kernels of `cuda.py` are given: a skewed load, tables planned for it, and tokens."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from cuda_place import Place
from loads import Counts, Model, Odds, batches, windows
from torch import Tensor

from equipoise.balancer.experts import plan
from equipoise.balancer.experts.change import change_of
from equipoise.balancer.experts.layout import Layout
from equipoise.balancer.experts.placement import Shape
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.stream import Role

SEED = 20
SALT = Salt(rank=3, layer=0, step=17)
TOP_K = 8
NOBODY = -1
"""In the place of a replica that there is not."""


@dataclass(frozen=True)
class Replicas:
    """The same placement as others keep it.

    Attributes:
        slots: int32 [experts, most], the slots of each expert; -1 behind the last.
        copies: int32 [experts], how many there are.
    """

    slots: Tensor
    copies: Tensor


@dataclass(frozen=True)
class Case:
    """A model's tables on the device, committed.

    Attributes:
        place: where.
        shape: how many of everything.
        model: of the load.
    """

    place: Place
    shape: Shape
    model: Model

    @staticmethod
    def of(place: Place, layers: int) -> "Case":
        """Of 256 experts, 288 slots and 32 ranks."""
        model = Model(layers=layers)
        return Case(place, Shape(layers, model.experts, 288, model.ranks), model)

    @cached_property
    def odds(self) -> Odds:
        """(layers, experts), how often each expert is chosen."""
        return next(windows(self.model, SEED, 1)).odds

    @cached_property
    def loads(self) -> Counts:
        """(layers, experts), rows of a batch that the tables were not planned for."""
        return next(batches(self.model, self.odds, SEED, 1))

    @cached_property
    def layout(self) -> Layout:
        """The connected placement, with the shares that are best for the window."""
        (window,) = windows(self.model, SEED, 1)
        found = plan(
            window.load, slots=self.shape.slots, ranks=self.shape.ranks, policy="connected"
        )
        return Layout(found.placement, found.shares)

    @cached_property
    def tables(self) -> Tables:
        """All layers', in force."""
        accelerator = self.place.accelerator
        shape = self.shape
        tables = Tables.empty(
            shape.layers, shape.experts, shape.slots, shape.ranks, accelerator.device
        )
        change = change_of(self.layout, shape, range(shape.layers))
        accelerator.kernels.commit_tables(change.update, tables, accelerator.stream(Role.COMPUTE))
        self.place.settle()
        return tables

    @cached_property
    def replicas(self) -> Replicas:
        """Layer 0."""
        row, experts = self.layout.placement[0], self.shape.experts
        copies = np.bincount(row, minlength=experts)
        slots = np.full((experts, int(copies.max())), NOBODY, dtype=np.int32)
        for expert in range(experts):
            held = np.flatnonzero(row == expert)
            slots[expert, : len(held)] = held
        return Replicas(self.on_device(slots), self.on_device(copies.astype(np.int32)))

    def ids(self, tokens: int) -> Tensor:
        """int32 [tokens * top_k]: for each token as many different experts, by their odds."""
        return self.on_device(chosen(self.odds[0], tokens, TOP_K, SEED).reshape(-1))

    def on_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A copy of it."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.place.accelerator.device)


def chosen(
    odds: npt.NDArray[np.float64], tokens: int, top_k: int, seed: int
) -> npt.NDArray[np.int32]:
    """(tokens, top_k): drawn without repeats (Gumbel's way), in the order of their scores."""
    noise = np.random.default_rng(seed).gumbel(size=(tokens, len(odds)))
    scores = np.log(odds) + noise
    best = np.argsort(-scores, axis=1)[:, :top_k]
    return best.astype(np.int32)


def gap(loads: Counts, tables: Tables, layer: int, cumulative: npt.NDArray[np.int64]) -> float:
    """The imbalance (max/mean - 1) that these shares make of a layer's load."""
    start = tables.start[int(tables.generation[layer]) & 1, layer].cpu().numpy()
    replicas = tables.replicas[int(tables.generation[layer]) & 1, layer].cpu().numpy()
    shares = np.diff(cumulative, prepend=0)
    first = start[:-1][np.diff(start) > 0]
    shares[first] = cumulative[first]
    experts = np.repeat(np.arange(len(start) - 1), np.diff(start))
    rows = np.bincount(
        replicas * tables.ranks // tables.slots,
        weights=loads[layer, experts] * shares / (1 << 16),
        minlength=tables.ranks,
    )
    return float(rows.max() / rows.mean() - 1.0)
