"""Levelled routing: a batch is divided so that every rank gets as many of its rows.

No shares are read, and nothing of other ranks: the division follows the batch's own counts. Where
the copies of experts connect the ranks, and each source rank levels its own rows, their sum is
level too. Integers throughout, so a kernel of any backend returns these values bit for bit
(clause G13).

**Loads** are in 1 / 256 row. Of the n rows of expert e with k replicas each replica begins with
floor(256 * n / k), the first one with the remainder too. A rank's load is the sum over its slots.

**Pairs.** The replicas of an expert form a ring, in the order of its run: replica i and i + 1, and
where there are more than two the last and the first. Pairs come in the order of experts, then of
first replicas.

**Sweeps.** A sweep takes each pair (a, b) in turn. With D = load of a's rank - load of b's rank,
D - (D >> 2) goes from a to b (a shift rounds down), but neither more than a has, nor, where it is
negative, more than b has. Half of D would level the two ranks. Half as much again converges in
about half the sweeps (successive over-relaxation); a rank's load never rises above the larger of
the two, and the sum of squared loads never rises. There are 8 sweeps for a batch by itself, and 32
for a group, whatever the rows are, so that a captured graph replays any. What sweeps leave over is
small beside what a rank cannot level of its own rows, and large beside what a group cannot.

**Rounding.** With d = mix32(e, rank, layer, 0) >> 24 the quotas of e end at floor((C_i + d) / 256),
where C_i is the sum of the loads up to replica i, and the last one at n. The dither makes ranks and
layers round differently. Then one more sweep in whole rows takes half of D, rounded towards zero:
it removes most of what the rounding adds.

**Order.** The t-th row of e in the batch goes to the replica whose quota holds t.

**Groups.** Several ranks that know the sum of their counts divide it as one batch: with the same
rank in the hash on all of them they get the same quotas, and the t-th row of e on one of them is
row `before[e]` + t of the group. A row beyond the last quota goes to the last replica. Who knows
the counts of all of them knows what each sends to each slot (`group_rows`).

**Padding** as in `equipoise.hal.routing`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from equipoise.hal.routing import RoutingTable, count_experts, mix32

FRACTION_BITS = 8
"""Bits of a row that loads are counted in."""
SWEEPS_ALONE = 8
SWEEPS_OF_GROUP = 32


@dataclass(frozen=True, eq=False)
class GroupCounts:
    """The counts of the ranks that divide their rows together, on the device.

    Attributes:
        total: int32 [experts], the sum over the ranks of the group; below 2**31 over all experts.
        before: int32 [experts], the sum over those of them that come before this one.
    """

    total: Tensor
    before: Tensor


def route_levelled(
    ids: Tensor,
    table: RoutingTable,
    ranks: int,
    rank: int,
    layer: int,
    group: GroupCounts | None = None,
) -> tuple[Tensor, Tensor]:
    """Route a batch so that all ranks get as many of its rows.

    Args:
        ids: int32 [n], expert ids.
        table: of this layer; its shares are not read.
        ranks: a divisor of the slots.
        rank: enters the dither; the same for all ranks of a group.
        layer: the layer's number.
        group: the counts of a group; without them the batch is divided by itself.

    Returns:
        Slots, int32 [n]; the batch's own tokens per expert, int32 [experts].
    """
    counts = count_experts(ids, table.experts)
    total, sweeps = (counts, SWEEPS_ALONE) if group is None else (group.total, SWEEPS_OF_GROUP)
    ends = quota_ends(total, table, ranks, rank, layer, sweeps)
    before = torch.zeros_like(counts) if group is None else group.before
    seen, slots = before.tolist(), []
    runs = table.start.tolist()
    for expert in ids.tolist():
        if not 0 <= expert < table.experts:
            slots.append(table.slots)
            continue
        first, last = runs[expert], runs[expert + 1] - 1
        place = next((i for i in range(first, last) if seen[expert] < ends[i]), last)
        slots.append(int(table.replicas[place]))
        seen[expert] += 1
    return torch.tensor(slots, dtype=torch.int32, device=ids.device), counts


def quota_ends(
    counts: Tensor, table: RoutingTable, ranks: int, rank: int, layer: int, sweeps: int
) -> list[int]:
    """Where the quota of each entry of the table ends, in rows of its expert.

    Args:
        counts: rows by expert, integers [experts].
        table: of this layer.
        ranks: a divisor of the slots.
        rank: enters the dither.
        layer: the layer's number.
        sweeps: how many to make before the rounding.
    """
    loads = _Loads(counts.tolist(), table, ranks)
    loads.level(sweeps)
    dither = mix32(torch.arange(table.experts), rank, layer, 0) >> (32 - FRACTION_BITS)
    loads.round(dither.tolist())
    return loads.ends()


def group_rows(counts: Tensor, table: RoutingTable, ranks: int, rank: int, layer: int) -> Tensor:
    """What each member of a group sends to each slot, without routing a row.

    Equal to the slots that `route_levelled` gives each member, counted.

    Args:
        counts: int32 [members, experts], in the order of the members.
        table: of this layer.
        ranks: a divisor of the slots.
        rank: enters the dither; the same for all members.
        layer: the layer's number.

    Returns:
        int64 [members, slots].
    """
    starts = table.start.long()
    expert = torch.arange(table.experts).repeat_interleave(starts.diff())
    ends = torch.tensor(quota_ends(counts.sum(0), table, ranks, rank, layer, SWEEPS_OF_GROUP))
    begins = ends.roll(1)
    begins[starts[:-1]] = 0
    until = counts.long().cumsum(0)[:, expert]
    since = until - counts[:, expert]
    rows = torch.zeros(len(counts), table.slots, dtype=torch.int64)
    common = torch.minimum(until, ends) - torch.maximum(since, begins)
    rows[:, table.replicas.long()] = common.clamp(min=0)
    return rows


class _Loads:
    """What each entry of a table takes, and each rank, in 1 / 256 row until they are rounded."""

    def __init__(self, counts: Sequence[int], table: RoutingTable, ranks: int) -> None:
        start, slots = table.start.tolist(), table.slots
        self.counts = counts
        self.runs = [range(first, end) for first, end in pairwise(start)]
        per_rank = slots // ranks
        self.homes: list[int] = [slot // per_rank for slot in table.replicas.tolist()]
        self.of_entry = [0] * slots
        for count, run in zip(counts, self.runs, strict=True):
            for entry in run:
                each, remainder = divmod(count << FRACTION_BITS, len(run))
                self.of_entry[entry] = each + (remainder if entry == run.start else 0)
        self.of_rank = [0] * ranks
        self._sum_up()

    def level(self, sweeps: int) -> None:
        """The sweeps in parts of rows."""
        for _ in range(sweeps):
            for a, b in self._pairs():
                difference = self._difference(a, b)
                self._move(a, b, difference - (difference >> 2))

    def round(self, dither: Sequence[int]) -> None:
        """To whole rows, and the sweep in them."""
        for expert, run in enumerate(self.runs):
            taken = 0
            exact = 0
            for entry in run:
                exact += self.of_entry[entry]
                end = (exact + dither[expert]) >> FRACTION_BITS
                end = self.counts[expert] if entry == run[-1] else end
                self.of_entry[entry], taken = end - taken, end
        self._sum_up()
        for a, b in self._pairs():
            difference = self._difference(a, b)
            self._move(a, b, (abs(difference) >> 1) * (1 if difference > 0 else -1))

    def ends(self) -> list[int]:
        """Inclusive sums within each expert."""
        ends = list(self.of_entry)
        for run in self.runs:
            for entry in run[1:]:
                ends[entry] += ends[entry - 1]
        return ends

    def _pairs(self) -> Iterator[tuple[int, int]]:
        for run in self.runs:
            yield from pairwise(run)
            if len(run) > 2:
                yield run[-1], run[0]

    def _difference(self, a: int, b: int) -> int:
        return self.of_rank[self.homes[a]] - self.of_rank[self.homes[b]]

    def _move(self, a: int, b: int, load: int) -> None:
        load = max(min(load, self.of_entry[a]), -self.of_entry[b])
        for entry, change in ((a, -load), (b, load)):
            self.of_entry[entry] += change
            self.of_rank[self.homes[entry]] += change

    def _sum_up(self) -> None:
        self.of_rank = [0] * len(self.of_rank)
        for entry, load in enumerate(self.of_entry):
            self.of_rank[self.homes[entry]] += load
