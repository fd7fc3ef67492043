"""A planner that proposes anything: from equal loads and layouts the same on every rank."""

from hashlib import blake2b
from random import Random

import numpy as np

from equipoise.balancer.experts.placement import ExpertShape, Layout, Load, solve_shares
from equipoise.balancer.experts.planning.rebalance_plan import RebalanceLimits, RebalancePlan

Row = list[int]


def scripted(
    windows: Load, installed: Layout, shape: ExpertShape, limits: RebalanceLimits, script: int
) -> RebalancePlan:
    """A plan drawn from its arguments, of cycles, exchanges, and copies that come and go."""
    state = blake2b(windows.tobytes() + installed.placement.tobytes(), digest_size=8)
    draw = Random(int.from_bytes(state.digest(), "little") ^ script)
    rows = [_changed(row, shape, draw) for row in installed.placement.tolist()]
    placement = np.array(rows, dtype=np.int32)
    differs = placement != installed.placement
    needs = differs.reshape(shape.layers, shape.ranks, -1).sum(axis=2).max(axis=1)
    beyond = needs > limits.staging
    placement[beyond] = installed.placement[beyond]
    order = np.flatnonzero((needs > 0) & ~beyond).tolist()
    draw.shuffle(order)
    shares = solve_shares(windows.sum(axis=0), placement, shape)
    zeros = np.zeros(shape.layers, dtype=np.int64)
    return RebalancePlan(Layout(placement, shares), tuple(order), zeros, zeros)


def _changed(row: Row, shape: ExpertShape, draw: Random) -> Row:
    """Another row, or the same."""
    change = draw.choice((_keep, _cycle, _cycle_inside, _shuffle, _copy, _copy))
    return change(row, shape, draw)


def _keep(row: Row, shape: ExpertShape, draw: Random) -> Row:
    return row


def _cycle(row: Row, shape: ExpertShape, draw: Random) -> Row:
    """Two or three slots of any ranks hand their experts on."""
    return _handed_on(row, draw.sample(range(shape.slots), draw.choice((2, 3))))


def _cycle_inside(row: Row, shape: ExpertShape, draw: Random) -> Row:
    """The same within a rank."""
    rank, size = draw.randrange(shape.ranks), shape.slots_per_rank
    mine = range(rank * size, (rank + 1) * size)
    return _handed_on(row, draw.sample(mine, min(size, draw.choice((2, 3)))))


def _shuffle(row: Row, shape: ExpertShape, draw: Random) -> Row:
    return draw.sample(row, len(row))


def _copy(row: Row, shape: ExpertShape, draw: Random) -> Row:
    """A slot whose expert sits elsewhere too takes up another expert."""
    spare = [slot for slot, expert in enumerate(row) if row.count(expert) > 1]
    if not spare:
        return row
    slot = draw.choice(spare)
    return [*row[:slot], draw.randrange(shape.experts), *row[slot + 1 :]]


def _handed_on(row: Row, slots: list[int]) -> Row:
    after = list(row)
    for here, there in zip(slots, [*slots[1:], slots[0]], strict=True):
        after[there] = row[here]
    return after
