"""Who places: vLLM's own policy, ours in its place, and our engine, which divides by shares."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from loads import Counts
from vllm.distributed.eplb.eplb_state import compute_logical_maps
from vllm.distributed.eplb.policy import AbstractEplbPolicy, DefaultEplbPolicy

from equipoise.balancer.experts.choices import Split
from equipoise.balancer.experts.config import Aims, EngineConfig
from equipoise.balancer.experts.drafting import Limits, Room, draft
from equipoise.balancer.experts.layout import Layout, even_shares, solve_shares
from equipoise.balancer.experts.placement import SHARE_ONE, Placement, Shape
from equipoise.integrations.vllm.policy import policy_class
from equipoise.integrations.vllm.settings import PolicySettings

GROUPS, NODES = 8, 4
"""Of the stock policy where it ties groups of experts to nodes."""
Rival = Callable[[Counts, Layout, Shape], Layout]
"""What it installs for a load, given what is installed."""
HYSTERESIS = EngineConfig.hysteresis


def start(shape: Shape) -> Layout:
    """vLLM's first map: experts in order, then the first ones again."""
    row = np.arange(shape.slots, dtype=np.int32) % shape.experts
    placement = np.tile(row, (shape.layers, 1))
    return Layout(placement, even_shares(placement, shape.experts))


@dataclass(frozen=True)
class Called:
    """A policy, called as vLLM calls it.

    Attributes:
        policy: of vLLM, or ours.
        groups: of experts.
        nodes: of ranks.
    """

    policy: type[AbstractEplbPolicy]
    groups: int = 1
    nodes: int = 1

    def __call__(self, load: Counts, installed: Layout, shape: Shape) -> Layout:
        """The map that it answers with; checked by the engine's own maps."""
        old = torch.from_numpy(installed.placement.astype(np.int64))
        sizes = shape.slots, self.groups, self.nodes, shape.ranks
        found = self.policy.rebalance_experts(torch.from_numpy(load), *sizes, old)
        placement = found.numpy().astype(np.int32)
        return Layout(placement, even_shares(placement, shape.experts))


def ours(**chosen: float) -> Called:
    """(a): our policy with these settings."""
    return Called(policy_class(PolicySettings(**chosen)))


def engine(load: Counts, installed: Layout, shape: Shape) -> Layout:
    """(b): what our engine drafts with default aims and staging for any layer."""
    room = Room.of(shape.slots_per_rank, shape)
    limits = Limits(HYSTERESIS, room, Aims(), nodes=1, split=Split.LEVEL)
    return draft(load[None], installed, shape, limits).layout


RIVALS: dict[str, Rival] = {
    "stock": Called(DefaultEplbPolicy),
    "stock, 4 nodes": Called(DefaultEplbPolicy, GROUPS, NODES),
    "(a) policy": ours(),
    "(b) engine": engine,
}
SHARED = ("(b) engine",)
"""Those that divide an expert by shares; the others evenly."""


def fetched(old: Placement, new: Placement, shape: Shape) -> int:
    """Copies that ranks get from others: experts they have now and had not."""
    return int((_held(new, shape) & ~_held(old, shape)).sum())


def changed(old: Placement, new: Placement) -> int:
    """Layers of which a slot changed."""
    return int((old != new).any(axis=1).sum())


def balancedness(load: Counts, layout: Layout, shape: Shape) -> float:
    """As vLLM's log has it: mean over ranks by the largest, both summed over layers."""
    rows = np.take_along_axis(load, layout.placement.astype(np.int64), axis=1)
    ranks = (rows * (layout.shares / SHARE_ONE)).reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    return float(ranks.mean(axis=1).sum() / ranks.max(axis=1).sum())


def exact(load: Counts, layout: Layout, shape: Shape) -> Layout:
    """With the shares that are best for this very load."""
    return Layout(layout.placement, solve_shares(load, layout.placement, shape))


def complete(layout: Layout, shape: Shape) -> bool:
    """Whether vLLM's own maps find a slot for every expert."""
    _, copies = compute_logical_maps(
        torch.from_numpy(layout.placement.astype(np.int64)), shape.experts
    )
    return bool((copies > 0).all())


def timed(call: Callable[[], Layout]) -> tuple[Layout, float]:
    """What it finds, and milliseconds of this thread's processor."""
    began = time.thread_time()
    found = call()
    return found, (time.thread_time() - began) * 1e3


def _held(placement: Placement, shape: Shape) -> npt.NDArray[np.bool_]:
    """(layers, ranks, experts)."""
    held = np.zeros((shape.layers, shape.ranks, shape.experts), dtype=np.bool_)
    parts = placement.reshape(shape.layers, shape.ranks, -1).astype(np.int64)
    np.put_along_axis(held, parts, True, axis=2)
    return held
