"""What routing means: the contract's clause in words, and a reference that every kernel equals.

Integers throughout, so a kernel of any backend returns these values bit for bit.

**Table.** One layer's placement (slot -> expert) and shares become three int32 arrays: the run
`start[e] .. start[e + 1]` of `replicas` lists the slots of expert e, ascending; `cumulative` holds
the inclusive sums of the run's shares and ends at 65536. Slot s lives on rank
s // (slots // ranks). A slot is in one run, once: what a kernel does with a table that lists one
twice is undefined.

**Mix.** mix32(index, rank, layer, step), all arithmetic modulo 2**32: the words step, layer, rank,
index are absorbed in this order into a state that starts at 0,
`state = finalise((state ^ word) + 0x9E3779B9)`, where finalise(x) is
`x ^= x >> 16; x *= 0x99F0736B; x ^= x >> 15; x *= 0xCEDA5629; x ^= x >> 16`.

**Hashed.** All passes read one sequence of draws, each in a window of its own: the window of a pass
begins at place mix32(0, rank, layer, step) mod 2**18. Element j of a batch, of expert e, reads
place k = begin + j, takes position p = mix32(k, 0, 0, 0) >> 24, one of 256, and goes to the first
replica of e whose cumulative share is above p * 256 + 128, the middle of that position. So a
replica gets its share rounded to 1 / 256 of the expert, and a device may keep both the sequence and
the replica of every position as tables, so that nothing but lookups is left for the step.

**Apportioned.** The batch's own count n of expert e is divided into whole quotas: replica i ends at
occurrence floor((cumulative_i * n + d) / 65536); the dither d = mix32(e, rank, layer, 0) >> 16
makes ranks round differently. The t-th occurrence of e in the batch goes to the replica whose
interval holds t. The quotas sum to n and each is within one of its exact share.

**Padding.** An id outside [0, experts) is routed to the invalid slot (= slots) and not counted.

**Shares.** Water-filling: block coordinate descent on the sum of squared rank loads. A load is
tokens * 65536; the replicas of one expert on one rank are one bin. At first every replica holds
floor(load / replicas), the first one the remainder too. Experts are refilled in ascending order:
the bins are emptied, then filled from the lowest rank load up to a common height; what the division
by the number of filled bins leaves over goes one unit each to the filled bins of the lowest ranks.
A refill of all experts is a sweep; the last is the one that changes nothing, or number `sweeps`.
Bins are split evenly among their replicas and rounded to shares by largest remainder (ties: lower
slot). Experts without tokens get even shares, the remainder of 65536 on the lowest slots; so do all
if the rounding would leave the largest rank above that of even shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor

from equipoise.hal.shares import SHARE_BITS as SHARE_BITS
from equipoise.hal.shares import SHARE_ONE as SHARE_ONE
from equipoise.hal.shares import SWEEPS as SWEEPS

POSITION_BITS = 8
POSITIONS = 1 << POSITION_BITS
"""How many values a draw of a hashed pass can have."""
POSITION_SHARE = SHARE_ONE // POSITIONS
WINDOWS = 1 << 18
"""Places at which the window of a hashed pass may begin."""
MASK32 = (1 << 32) - 1
STEP32 = 0x9E3779B9

Word = TypeVar("Word", int, Tensor)


@dataclass(frozen=True, eq=False)
class RoutingTable:
    """The routing table of one layer, on one device.

    Only dtypes, shapes and devices are checked: to read values would wait for the device.

    Attributes:
        start: int32 [experts + 1], exclusive prefix sums of the number of replicas.
        replicas: int32 [slots], slots by expert, ascending within each expert; each once.
        cumulative: int32 [slots], inclusive sums of shares within the expert, in 1 / 65536.

    Raises:
        ValueError: another dtype, number of dimensions, size or mixture of devices.
    """

    start: Tensor
    replicas: Tensor
    cumulative: Tensor

    def __post_init__(self) -> None:
        for name in ("start", "replicas", "cumulative"):
            part = getattr(self, name)
            if part.dtype != torch.int32 or part.ndim != 1:
                raise ValueError(f"{name}: expected int32 [n], got {part.dtype} {[*part.shape]}")
            if part.device != self.start.device:
                raise ValueError(f"{name}: expected on {self.start.device}, got {part.device}")
        if self.start.numel() < 2:
            raise ValueError(f"start: expected at least 2 elements, got {self.start.numel()}")
        if self.replicas.shape != self.cumulative.shape:
            raise ValueError(f"cumulative: expected {self.slots} elements, as many as replicas")

    @property
    def experts(self) -> int:
        """Logical experts of the layer."""
        return self.start.numel() - 1

    @property
    def slots(self) -> int:
        """Physical slots of the layer, over all ranks; also the invalid slot."""
        return self.replicas.numel()


@dataclass(frozen=True, eq=False)
class DispatchCounts:
    """What all ranks send in one dispatch, known from their counts before any of them sends.

    Attributes:
        rows: int64 [ranks, slots], on the host: rows that each rank sends to each slot.
        generations: of the routing tables of each rank, as they were when it counted.
    """

    rows: Tensor
    generations: tuple[int, ...]


def _finalise32(x: Word) -> Word:
    x = x ^ (x >> 16)
    x = (x * 0x99F0736B) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0xCEDA5629) & MASK32
    return x ^ (x >> 16)


def mix32(index: Tensor, rank: int, layer: int, step: int) -> Tensor:
    """Hash each entry of `index`, int64 of any shape, to int64 in [0, 2**32)."""
    return _absorb32(_state32(rank, layer, step), index)


def _state32(rank: int, layer: int, step: int) -> int:
    state = 0
    for word in (step, layer, rank):
        state = _absorb32(state, word)
    return state


def _absorb32(state: int, word: Word) -> Word:
    return _finalise32((((word & MASK32) ^ state) + STEP32) & MASK32)


def window_begin(rank: int, layer: int, step: int) -> int:
    """The place in the sequence of draws at which the window of a hashed pass begins."""
    return _absorb32(_state32(rank, layer, step), 0) % WINDOWS


def draw_positions(places: Tensor) -> Tensor:
    """The positions, int64 in [0, 256), at `places`, int64, of the sequence of draws."""
    return mix32(places, 0, 0, 0) >> (32 - POSITION_BITS)


def position_counts(cumulative: Tensor) -> Tensor:
    """How many positions are below `cumulative`, any integers in units of 1 / 65536."""
    return (cumulative + (POSITION_SHARE // 2 - 1)) // POSITION_SHARE


def build_table(placement: Tensor, shares: Tensor, experts: int) -> RoutingTable:
    """Make the table of one layer.

    Args:
        placement: int32 [slots], the expert in each slot.
        shares: int32 [slots], in 1 / 65536.
        experts: how many logical experts the layer has.

    Raises:
        ValueError: sizes differ, an expert is out of range or without a slot, a share is negative,
            or the shares of an expert do not sum to 65536.
    """
    if placement.shape != shares.shape:
        raise ValueError(f"shares: expected {placement.numel()} elements, got {shares.numel()}")
    if placement.numel() and not 0 <= int(placement.min()) <= int(placement.max()) < experts:
        raise ValueError(f"placement: expected experts 0 to {experts - 1}, got others")
    if shares.numel() and int(shares.min()) < 0:
        raise ValueError(f"shares: expected 0 to {SHARE_ONE}, got {int(shares.min())}")
    copies = torch.bincount(placement, minlength=experts)
    if int(copies.min()) == 0:
        raise ValueError(f"placement: expected a slot for every expert, none for {copies.argmin()}")
    order = torch.argsort(placement, stable=True)
    start = torch.cat([copies.new_zeros(1), copies.cumsum(0)])
    running = shares[order].long().cumsum(0)
    sums = running[start[1:] - 1].diff(prepend=running.new_zeros(1))
    if bool((sums != SHARE_ONE).any()):
        wrong = int((sums != SHARE_ONE).nonzero()[0])
        raise ValueError(f"shares: expected a sum of 65536 for expert {wrong}, got {sums[wrong]}")
    cumulative = running - SHARE_ONE * placement[order].long()
    return RoutingTable(start.int(), order.int(), cumulative.int())


def count_experts(ids: Tensor, experts: int) -> Tensor:
    """Count each expert, int32 [experts], in `ids`, int32 [n]."""
    inside = ids[(ids >= 0) & (ids < experts)]
    return torch.bincount(inside, minlength=experts).int()


def route_hashed(
    ids: Tensor, table: RoutingTable, rank: int, layer: int, step: int
) -> tuple[Tensor, Tensor]:
    """Route by the draw of each element's place.

    Args:
        ids: int32 [n], expert ids.
        table: of this layer.
        rank: the rank whose batch this is.
        layer: the layer's number.
        step: the engine's step counter; taken modulo 2**32.

    Returns:
        Slots, int32 [n]; tokens per expert, int32 [experts].
    """
    places = torch.arange(ids.numel(), device=ids.device) + window_begin(rank, layer, step)
    draw = draw_positions(places) * POSITION_SHARE + POSITION_SHARE // 2
    experts = _owners(table)
    # Runs follow each other, so with an offset per expert one sorted array serves all.
    ends = table.cumulative.long() + experts * SHARE_ONE
    chosen = torch.searchsorted(ends, draw + ids.long() * SHARE_ONE, right=True)
    return _pick(ids, table, chosen), count_experts(ids, table.experts)


def route_apportioned(
    ids: Tensor, table: RoutingTable, rank: int, layer: int
) -> tuple[Tensor, Tensor]:
    """Route by whole quotas of this batch's own counts; arguments and result as `route_hashed`."""
    counts = count_experts(ids, table.experts)
    first = counts.long().cumsum(0) - counts
    owners = _owners(table)
    dither = mix32(torch.arange(table.experts, device=ids.device), rank, layer, 0) >> 16
    quota_ends = (table.cumulative * counts.long()[owners] + dither[owners]) >> SHARE_BITS
    padding = (ids < 0) | (ids >= table.experts)
    kind = torch.where(padding, table.experts, ids).long()
    order = torch.argsort(kind, stable=True)
    # Sorted by expert, an element's position is its occurrence plus the experts before it.
    position = torch.empty_like(order)
    position[order] = torch.arange(ids.numel(), device=ids.device)
    chosen = torch.searchsorted(quota_ends + first[owners], position, right=True)
    return _pick(ids, table, chosen), counts


def _owners(table: RoutingTable) -> Tensor:
    copies = table.start.long().diff()
    return torch.repeat_interleave(torch.arange(table.experts, device=copies.device), copies)


def _pick(ids: Tensor, table: RoutingTable, chosen: Tensor) -> Tensor:
    inside = (ids >= 0) & (ids < table.experts)
    slots = table.replicas[chosen.clamp(max=table.slots - 1)]
    return torch.where(inside, slots, table.slots).int()


def solve_shares(counts: Tensor, placement: Tensor, ranks: int, sweeps: int = SWEEPS) -> Tensor:
    """Shares by slot that level the rank loads of every layer.

    Args:
        counts: tokens per expert, integers [layers, experts].
        placement: int32 [layers, slots].
        ranks: a divisor of slots.
        sweeps: the most sweeps to make.

    Returns:
        int32 [layers, slots]; the shares of an expert sum to 65536.

    Raises:
        ValueError: ranks does not divide the slots, or an expert has no slot.
    """
    shares = torch.empty_like(placement)
    for load, places, out in zip(counts, placement, shares, strict=True):
        order = torch.argsort(places, stable=True)
        runs = torch.split(order, torch.bincount(places, minlength=load.numel()).tolist())
        solved = _solve(load.tolist(), [run.tolist() for run in runs], ranks, sweeps)
        out[order] = torch.tensor([share for run in solved for share in run], dtype=torch.int32)
    return shares


def solve_cumulative(
    counts: Tensor, table: RoutingTable, ranks: int, sweeps: int = SWEEPS
) -> Tensor:
    """The `cumulative`, int32 [slots], that levels the ranks for `counts`, integers [experts]."""
    sizes = table.start.diff().tolist()
    runs = [run.tolist() for run in torch.split(table.replicas, sizes)]
    solved = _solve(counts.tolist(), runs, ranks, sweeps)
    sums = [torch.tensor(run).cumsum(0) for run in solved]
    return torch.cat(sums).int().to(table.cumulative.device)


def _solve(
    counts: Sequence[int], runs: Sequence[Sequence[int]], ranks: int, sweeps: int
) -> list[list[int]]:
    """Shares of each expert's replicas; `runs` are the slots of each expert, ascending."""
    slots = sum(len(run) for run in runs)
    if not all(runs):
        raise ValueError(f"placement: expected a slot for every expert, none for {runs.index([])}")
    if ranks < 1 or slots % ranks:
        raise ValueError(f"ranks: expected a positive divisor of {slots} slots, got {ranks}")
    per_rank = slots // ranks
    homes = [[slot // per_rank for slot in run] for run in runs]
    bins = [_first_fill(count, home) for count, home in zip(counts, homes, strict=True)]
    levels = [sum(of_expert.get(rank, 0) for of_expert in bins) for rank in range(ranks)]
    for _ in range(sweeps):
        # A list, not a generator: every expert is refilled, also after the first change.
        if not any([_refill(of_expert, levels) for of_expert in bins]):
            break
    even = [_even_shares(len(home)) for home in homes]
    solved = [_round(*of_expert) for of_expert in zip(counts, homes, bins, strict=True)]
    return solved if _peak(counts, homes, solved) <= _peak(counts, homes, even) else even


def _first_fill(count: int, home: list[int]) -> dict[int, int]:
    each, remainder = divmod(count * SHARE_ONE, len(home))
    load = {rank: each * home.count(rank) for rank in home}
    load[home[0]] += remainder
    return load


def _refill(bins: dict[int, int], levels: list[int]) -> bool:
    """Refill one expert's bins (rank -> load) beside the other loads; returns what changed."""
    before, total = dict(bins), sum(bins.values())
    for rank, load in before.items():
        levels[rank] -= load
    order = sorted(bins, key=lambda rank: (levels[rank], rank))
    wet = [
        rank for k, rank in enumerate(order) if k == 0 or _depth(order[:k], levels, rank) < total
    ]
    height, remainder = divmod(total + sum(levels[rank] for rank in wet), len(wet))
    bins.update(dict.fromkeys(order, 0))
    # By rank, not by load: a remainder that followed the loads would wander for ever.
    for k, rank in enumerate(sorted(wet)):
        bins[rank] = height - levels[rank] + (k < remainder)
    for rank, load in bins.items():
        levels[rank] += load
    return bins != before


def _depth(lower: list[int], levels: list[int], rank: int) -> int:
    """How much the `lower` ranks take before the water reaches `rank`."""
    return sum(levels[rank] - levels[other] for other in lower)


def _even_shares(copies: int) -> list[int]:
    return [SHARE_ONE // copies + (k < SHARE_ONE % copies) for k in range(copies)]


def _round(count: int, home: list[int], bins: dict[int, int]) -> list[int]:
    if count == 0:
        return _even_shares(len(home))
    fractions = [Fraction(bins[rank], count * home.count(rank)) for rank in home]
    shares = [int(share) for share in fractions]
    by_remainder = sorted(range(len(home)), key=lambda k: (shares[k] - fractions[k], k))
    for k in by_remainder[: SHARE_ONE - sum(shares)]:
        shares[k] += 1
    return shares


def _peak(counts: Sequence[int], homes: list[list[int]], shares: list[list[int]]) -> int:
    levels: dict[int, int] = {}
    for count, home, run in zip(counts, homes, shares, strict=True):
        for rank, share in zip(home, run, strict=True):
            levels[rank] = levels.get(rank, 0) + count * share
    return max(levels.values())
