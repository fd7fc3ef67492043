"""Routing tables for programs: made from a few numbers, installed by the backend's kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.hal.conformance.bench import Bench
from equipoise.hal.kernels import Salt, Tables, TableUpdate
from equipoise.hal.routing import SHARE_ONE, RoutingTable, build_table
from equipoise.hal.stream import Stream


def table(placement: Sequence[int], weights: Sequence[int]) -> RoutingTable:
    """On the host: slot s holds expert `placement[s]` and takes tokens in proportion `weights[s]`.

    Experts whose weights are all 0 share evenly.
    """
    shares = [0] * len(placement)
    for expert in set(placement):
        slots = [slot for slot, held in enumerate(placement) if held == expert]
        parts = [weights[slot] for slot in slots]
        parts = parts if any(parts) else [1] * len(slots)
        ends = [SHARE_ONE * sum(parts[: n + 1]) // sum(parts) for n in range(len(parts))]
        for slot, end, begin in zip(slots, ends, [0, *ends], strict=False):
            shares[slot] = end - begin
    held, share = (torch.tensor(numbers, dtype=torch.int32) for numbers in (placement, shares))
    return build_table(held, share, max(placement) + 1)


def update(layer: int, made: RoutingTable) -> TableUpdate:
    """What installs `made` as the tables of one layer."""
    return TableUpdate((layer,), made.start[None], made.replicas[None], made.cumulative[None])


def tables(bench: Bench, layers: int, experts: int, slots: int, ranks: int) -> Tables:
    """Zeroed tables in the device's memory."""
    return Tables(
        generation=bench.filled((layers,), 0, torch.int64),
        start=bench.filled((2, layers, experts + 1), 0, torch.int32),
        replicas=bench.filled((2, layers, slots), 0, torch.int32),
        cumulative=bench.filled((2, layers, slots), 0, torch.int32),
        ranks=ranks,
    )


@dataclass(frozen=True)
class Routed:
    """Where a routing pass leaves its results: int32 [tokens] and int32 [experts]."""

    slots: Tensor
    counts: Tensor


def routed(bench: Bench, tokens: int, experts: int) -> Routed:
    """Results of a pass that has not run."""
    return Routed(bench.empty((tokens,), torch.int32), bench.empty((experts,), torch.int32))


def route(bench: Bench, ids: Tensor, live: Tables, salt: Salt, stream: Stream) -> Routed:
    """A hashed routing pass over `ids`, int32 [tokens]."""
    out = routed(bench, ids.numel(), live.experts)
    bench.accelerator.kernels.route_and_count(ids, live, salt, out.slots, out.counts, stream)
    return out
