"""Batches of one layer in every share mode, as the native kernels route them: whole rows, in slots.

The kernels are called as the ranks call them, one source rank after the other, each with rows of
its own; what comes back is rows of each destination rank.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.placement import SHARE_ONE, ExpertShape, Layout, Load
from equipoise.balancer.experts.routing.drift import DriftDetector

Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
SUB_WINDOW = 2
"""Steps that are summed for lagged shares. They are in use from the second step after the last."""
MIN_GAIN = int(0.01 * SHARE_ONE)
"""The engine's default."""


class Table:
    """The routing table of one layer, and how many ranks its slots are on."""

    def __init__(self, layout: Layout, layer: int, shape: ExpertShape) -> None:
        self.ranks, self.layer = shape.ranks, layer
        self.start = np.empty(shape.experts + 1, np.int32)
        self.replicas, self.cumulative = (np.empty(shape.slots, np.int32) for _ in range(2))
        _native.build_table(
            layout.placement[layer],
            layout.shares[layer],
            shape.experts,
            self.start,
            self.replicas,
            self.cumulative,
        )
        self.homes = np.arange(shape.slots) // shape.slots_per_rank


@dataclass(frozen=True)
class Batch:
    """Rows of one layer.

    Attributes:
        counts: (sources, experts), of each source rank.
        ids: the expert of every row of each source rank, in the order of the batch.
    """

    counts: Counts
    ids: Sequence[Ids]


def batch_of(counts: Counts, generator: np.random.Generator) -> Batch:
    """Rows in random order."""
    experts = np.arange(counts.shape[1], dtype=np.int32)
    ids = [np.repeat(experts, source) for source in counts]
    for rows in ids:
        generator.shuffle(rows)
    return Batch(counts, ids)


Route = Callable[[int, Ids, Ids, Ids], None]
"""Source rank, its rows; slots and counts are written."""


def rank_rows(batch: Batch, table: Table, route: Route) -> Counts:
    """(ranks,): rows that each gets of all sources."""
    counts = np.empty(batch.counts.shape[1], np.int32)
    slots = [np.empty_like(ids) for ids in batch.ids]
    for source, (ids, out) in enumerate(zip(batch.ids, slots, strict=True)):
        route(source, ids, out, counts)
    return np.bincount(table.homes[np.concatenate(slots)], minlength=table.ranks)


def hashed(batch: Batch, table: Table, step: int) -> Counts:
    """`static`, and `lagged` with the shares of the time."""
    arrays = table.start, table.replicas, table.cumulative

    def route(source: int, ids: Ids, slots: Ids, counts: Ids) -> None:
        _native.route_hashed(ids, *arrays, source, table.layer, step, slots, counts)

    return rank_rows(batch, table, route)


def local(batch: Batch, table: Table) -> Counts:
    """Every source levels its own rows."""

    def route(source: int, ids: Ids, slots: Ids, counts: Ids) -> None:
        _native.route_levelled(
            ids, table.start, table.replicas, table.ranks, source, table.layer, slots, counts
        )

    return rank_rows(batch, table, route)


def node(batch: Batch, table: Table, size: int) -> Counts:
    """So many neighbouring sources level their sum; in the mode `exact` all of them do."""
    by_node = batch.counts.reshape(-1, size, batch.counts.shape[1]).astype(np.int32)
    totals = by_node.sum(axis=1, dtype=np.int32)
    before = by_node.cumsum(axis=1, dtype=np.int32) - by_node

    def route(source: int, ids: Ids, slots: Ids, counts: Ids) -> None:
        number, member = divmod(source, size)
        _native.route_levelled(
            ids, table.start, table.replicas, table.ranks, number, table.layer, slots, counts,
            totals[number], before[number, member],
        )  # fmt: skip

    return rank_rows(batch, table, route)


def lagged_layouts(
    loads: Sequence[Load], layout: Layout, shape: ExpertShape, planned: int
) -> Iterator[Layout]:
    """What is installed at every step, by the engine's own rule of when shares are solved again.

    Args:
        loads: (layers, experts) of each step, over all ranks.
        layout: at the first step.
        shape: numbers of layers, experts, slots and ranks.
        planned: sub-windows that the layout was planned on.
    """
    detector = DriftDetector(shape, MIN_GAIN, planned)
    due: deque[tuple[int, Layout]] = deque()
    for step in range(len(loads)):
        while due and due[0][0] <= step:
            layout = due.popleft()[1]
        yield layout
        if (step + 1) % SUB_WINDOW == 0:
            load = np.sum(loads[step + 1 - SUB_WINDOW : step + 1], axis=0)
            shares = detector.new_shares(load, layout)
            if shares is not None:
                due.append((step + 2, Layout(layout.placement, shares)))


def imbalance(rows: Counts) -> float:
    """max/mean - 1."""
    return float(rows.max() / rows.mean() - 1)


def singles_alone(counts: Counts, table: Table) -> float:
    """Imbalance that the rows of experts with one replica leave, however all others are divided."""
    single = np.diff(table.start) == 1
    homes = table.homes[table.replicas[table.start[:-1][single]]]
    rows = np.bincount(homes, weights=counts.sum(axis=0)[single], minlength=table.ranks)
    return max(float(rows.max() / counts.sum() * table.ranks - 1), 0.0)


@dataclass(frozen=True)
class Trial:
    """What is served, and on what.

    Attributes:
        layout: planned beforehand.
        shape: numbers of layers, experts, slots and ranks.
        steps: (layers, sources, experts) of each step.
        before: (layers, experts) of the steps before them, over all ranks: lagged shares know them.
        planned: sub-windows that the layout was planned on.
    """

    layout: Layout
    shape: ExpertShape
    steps: Sequence[Counts]
    before: Sequence[Load] = ()
    planned: int = 1


def routed(trial: Trial, modes: Sequence[str], seed: int = 0) -> dict[str, Floats]:
    """(steps, layers) imbalance of each mode, and of `singles`; all see the same rows.

    Args:
        trial: what is served.
        modes: `static`, `lagged`, `local`, `node_N`, `exact`.
        seed: of the order of rows.
    """
    generator, layers = np.random.default_rng(seed), range(trial.shape.layers)
    tables = [Table(trial.layout, layer, trial.shape) for layer in layers]
    figures = {mode: np.empty((len(trial.steps), len(layers))) for mode in (*modes, "singles")}
    lagged_tables, installed = tables, trial.layout
    for number, (step, layout) in enumerate(zip(trial.steps, _lagged(trial, modes), strict=True)):
        if layout is not installed:
            installed = layout
            lagged_tables = [Table(layout, layer, trial.shape) for layer in layers]
        for layer, table in enumerate(tables):
            batch = batch_of(step[layer], generator)
            for mode in modes:
                chosen = lagged_tables[layer] if mode == "lagged" else table
                figures[mode][number, layer] = imbalance(_rows(mode, batch, chosen, number))
            figures["singles"][number, layer] = singles_alone(step[layer], table)
    return figures


def _lagged(trial: Trial, modes: Sequence[str]) -> Iterable[Layout]:
    """The layout of every step of the trial in the mode `lagged`."""
    if "lagged" not in modes:
        return [trial.layout] * len(trial.steps)
    loads = [*trial.before, *(step.sum(axis=1) for step in trial.steps)]
    layouts = lagged_layouts(loads, trial.layout, trial.shape, trial.planned)
    return islice(layouts, len(trial.before), None)


def _rows(mode: str, batch: Batch, table: Table, step: int) -> Counts:
    name, _, size = mode.partition("_")
    if name in ("static", "lagged"):
        return hashed(batch, table, step)
    if name == "node":
        return node(batch, table, int(size))
    return node(batch, table, len(batch.ids)) if name == "exact" else local(batch, table)
