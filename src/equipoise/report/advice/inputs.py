"""Inputs of advice: statistics split into windows to plan on and windows to measure on.

Also the imbalance that chance leaves when rows fall on ranks at random, the rows and time of a
step, and the requests that the KV cache lets run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise.balancer.experts.placement import ExpertShape, Layout, Placement, even_shares
from equipoise.balancer.experts.planning.planner import plan
from equipoise.balancer.experts.routing.rank_rows import levelled_rank_rows
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.advice.hardware import Expert, Hardware, Roofline
from equipoise.report.advice.kv_cache import KvCache
from equipoise.report.placement.spread import Reals, layout_load, mean_known, sum_windows
from equipoise.report.run.metrics import noise_floor

OnProgress = Callable[[str], None]
"""Hears what is planned next."""


LEAST_GAIN = 0.02
"""Part of throughput, or of the experts' time, below which a change is not worth making."""


def no_progress(what: str) -> None:
    """Ignores it."""


@dataclass(frozen=True, kw_only=True)
class AdviceInputs:
    """Recorded load, and where it is to be served.

    Attributes:
        statistics: what was recorded.
        ranks: that serve.
        slots: of a layer; None to be advised.
        installed: what runs now; None for experts in their order on consecutive ranks.
        target: imbalance, max/mean - 1 of the ranks, that is good enough.
        step_rows: rows of a layer in a step, over all ranks; None: a window is a step.
        expert: what an expert weighs; None where unknown.
        hardware: of a rank; None where unknown.
        link: that weights come over, a name of `hardware.LINKS`.
        latency: seconds from token to token; None where there is no aim.
        memory_share: part of a rank's memory that experts may take.
        moe_share: part of the latency that experts may take.
        kv_cache: what it shares memory with expert weights for; needs `expert`. None where unknown.
        kv_usage: part of the KV cache that is in use at most; 1: it bounds the requests that run.
        dead_zone: step time by imbalance, as measured; None for `DeadZone.default`.
    """

    statistics: ExpertStatistics
    ranks: int
    slots: int | None = None
    installed: ExpertPlacement | None = None
    target: float = 0.02
    step_rows: int | None = None
    expert: Expert | None = None
    hardware: Hardware | None = None
    link: str = "node"
    latency: float | None = None
    memory_share: float = 0.8
    moe_share: float = 0.5
    kv_cache: KvCache | None = None
    kv_usage: float = 1.0
    dead_zone: DeadZone | None = None

    @property
    def zone(self) -> DeadZone:
        """Step time by imbalance: as measured, or the default."""
        return self.dead_zone or DeadZone.default(self.ranks)

    @property
    def slots_now(self) -> int:
        """Of a layer, over all ranks."""
        if self.installed is not None:
            return self.installed.slots
        return -(-self.statistics.experts // self.ranks) * self.ranks

    def kv_tokens(self, slots: int) -> int | None:
        """Of a rank that holds its part of so many slots in each layer; None where unknown."""
        if self.kv_cache is None or self.expert is None:
            return None
        return self.kv_cache.tokens(self.weight_bytes(self.expert, slots))

    def weight_bytes(self, expert: Expert, slots: int) -> int:
        """Of the experts of a rank, over all layers."""
        return slots // self.ranks * len(self.statistics.layers) * expert.size

    def running_requests(self, slots: int) -> float:
        """Requests that run with so many slots over those that run now; 1 where unknown.

        As many as their tokens fit, while there are more to run: a KV cache that is in use in part
        only may shrink to that part, and lets no more run where it grows.
        """
        now, then = self.kv_tokens(self.slots_now), self.kv_tokens(slots)
        if not now or then is None:
            return 1.0
        fitting = then / now / self.kv_usage
        return fitting if self.kv_usage == 1 else min(fitting, 1.0)

    @property
    def roofline(self) -> Roofline | None:
        """Where the hardware and what an expert weighs are known."""
        if self.expert is None or self.hardware is None:
            return None
        return Roofline(self.expert, self.hardware)


EXACT_RANKS = 16
"""Up to which the rows' fixed sum is heeded; beyond, counts of ranks are as good as independent."""
TAIL = 12.0
"""Standard deviations above the mean that a count hardly ever passes."""


def chance_imbalance(rows: int, ranks: int) -> float:
    """Expected max/mean - 1 of `rows` rows thrown uniformly on `ranks` ranks.

    Up to `EXACT_RANKS` as `noise_floor` says. Beyond, the largest of independent Poisson counts:
    the sum over m of 1 - F(m)^ranks, where F is their distribution.
    """
    if ranks <= EXACT_RANKS:
        return noise_floor(rows, ranks)
    mean = rows / ranks
    most = math.ceil(mean + TAIL * math.sqrt(mean) + TAIL**2)
    low = max(0, math.floor(mean - TAIL * math.sqrt(mean)))
    # Counts below `low` have next to no probability: there the largest is surely above.
    counts = np.arange(low, most)
    logs = counts * math.log(mean) - mean - np.array([math.lgamma(m + 1) for m in counts])
    below = np.minimum(np.cumsum(np.exp(logs)), 1.0)
    return float(low + (1.0 - below**ranks).sum()) / mean - 1.0


MAX_WINDOWS = 64
"""To measure on: more take time and change nothing."""
FOLLOWED_WINDOWS = 8
"""Likewise, which are planned by the one before: each is a plan."""
LOCAL_WINDOWS = 8
"""Likewise, of which steps are drawn: a step is levelled rank by rank."""
MAX_LOCAL_ROWS = 8192
"""Of a rank in such a step: 1,024 tokens of 8 experts. More rows are more level."""


ServedWindows = tuple[tuple[ExpertStatistics, ExpertPlacement], ...]
"""Windows, and the layout that serves them."""


@dataclass(frozen=True)
class TrainTestSplit:
    """Windows of one run.

    Attributes:
        train: the first half, that is planned on.
        test: the other half, or of it as many, evenly spaced, as `MAX_WINDOWS`; the same as
            `train` where there is one window only.
        all: every window with rows, in order.
    """

    train: ExpertStatistics
    test: ExpertStatistics
    all: ExpertStatistics

    @classmethod
    def of(cls, statistics: ExpertStatistics) -> "TrainTestSplit":
        """One window is planned on and measured on; windows without rows are left out."""
        with_rows = np.flatnonzero(statistics.counts.any(axis=(1, 2)))
        if len(with_rows) < statistics.windows:
            statistics = _windows(statistics, with_rows)
        half = statistics.windows // 2
        if not half:
            return cls(statistics, statistics, statistics)
        rest = range(half, statistics.windows)
        places = np.linspace(rest[0], rest[-1], min(len(rest), MAX_WINDOWS)).round().astype(int)
        train, test = np.arange(half), places
        return cls(_windows(statistics, train), _windows(statistics, test), statistics)

    @property
    def held_out(self) -> bool:
        """Whether other windows are measured on than planned on."""
        return self.train is not self.test

    @property
    def rows(self) -> int:
        """Of a layer in a window, the mean over those measured on; at least 1."""
        return max(1, round(float(self.test.counts.sum(axis=2).mean())))

    def planned_imbalance(self, layout: ExpertPlacement) -> float:
        """Imbalance of the rows that are planned on, summed; mean over layers."""
        return mean_known(layout_load("", sum_windows(self.train), layout).by_rank.imbalance)

    def measured_imbalance(self, layout: ExpertPlacement) -> Reals:
        """(layers,): imbalance in the windows that are measured on, mean over them."""
        return served_imbalance(self.once(layout))

    def once(self, layout: ExpertPlacement) -> "ServedWindows":
        """The windows measured on, all served by one layout."""
        return ((self.test, layout),)

    def following(self, slots: int, ranks: int) -> "ServedWindows":
        """Windows measured on, each served by the plan of the window before it.

        That is what a balancer that follows the load does. `FOLLOWED_WINDOWS` of them at most: one
        of each run of as many, drawn, since domains may alternate as often as a sample is taken.
        None of fewer than three windows: the plan of the one before is then that of `train`.
        """
        windows, half = self.all, self.all.windows // 2
        if windows.windows < 3:
            return ()
        rest = np.arange(half, windows.windows)
        runs = np.array_split(rest, min(len(rest), FOLLOWED_WINDOWS))
        draws = np.random.default_rng(0)
        served = []
        for place in (int(draws.choice(run)) for run in runs):
            before = plan(windows.counts[place - 1], slots=slots, ranks=ranks, policy="connected")
            layout = ExpertPlacement(before.placement, before.shares, ranks, windows.layers)
            served.append((_windows(windows, np.array([place])), layout))
        return tuple(served)

    def imbalance_with_exact_shares(self, placement: Placement, ranks: int) -> Reals:
        """(layers,): the same where shares are solved anew on the rows of each window itself."""
        slots = placement.shape[1]
        imbalances = []
        for counts in self.test.counts:
            window_plan = plan(counts, slots=slots, ranks=ranks, installed=placement, max_copies=0)
            imbalances.append(np.where(counts.any(axis=1), window_plan.layer_imbalance, np.nan))
        return _mean_of_known(np.array(imbalances))

    def imbalance_of_steps(
        self, placement: Placement, now: ExpertPlacement, rows: int
    ) -> tuple[Reals, Reals]:
        """(layers,) twice: of steps whose ranks each level their own rows, and of the same now.

        Every rank draws its rows of a step by the counts of a window, `MAX_LOCAL_ROWS` at most, and
        divides them by the engine's own kernel; mean over `LOCAL_WINDOWS` windows.

        Args:
            placement: that the rows are levelled on.
            now: layout that serves the same steps, for comparison; its ranks draw.
            rows: of a layer in a step, over all ranks.
        """
        ranks = now.ranks
        most = min(rows, MAX_LOCAL_ROWS * ranks)
        rows_of_ranks = most // ranks + (np.arange(ranks) < most % ranks)
        places = np.linspace(0, self.test.windows - 1, min(LOCAL_WINDOWS, self.test.windows))
        (layers, slots), experts = placement.shape, self.test.experts
        shape = ExpertShape(layers, experts, slots, ranks)
        layout = Layout(placement, even_shares(placement, experts))  # which nothing reads
        levelled, unlevelled = [], []
        for window in places.round().astype(int).tolist():
            load = self.test.counts[window]
            # A layer without rows draws something, which is left out.
            chances = np.where(load.any(axis=1, keepdims=True), load, 1).astype(np.float64)
            chances /= chances.sum(axis=1, keepdims=True)
            draws = np.random.default_rng(window)
            counts = draws.multinomial(rows_of_ranks[:, None], chances)  # (ranks, layers, experts)
            by_rank = levelled_rank_rows(counts.astype(np.int32), layout, shape)
            uneven = by_rank.max(axis=1) / by_rank.mean(axis=1) - 1.0
            levelled.append(np.where(load.any(axis=1), uneven, np.nan))
            step = np.where(load.any(axis=1, keepdims=True), counts.sum(axis=0), 0)[None]
            drawn = ExpertStatistics(step.astype(np.int64), self.test.layers)
            unlevelled.append(layout_load("", drawn, now).by_rank.imbalance)
        return _mean_of_known(np.array(levelled)), _mean_of_known(np.array(unlevelled))

    def chance_imbalance(self, ranks: int, rows: int) -> float:
        """What chance alone leaves of so many rows of a layer on balanced ranks."""
        return chance_imbalance(rows, ranks)


def _windows(
    statistics: ExpertStatistics, places: "np.typing.NDArray[np.int64]"
) -> ExpertStatistics:
    return ExpertStatistics(statistics.counts[places], statistics.layers)


def _mean_of_known(values: Reals) -> Reals:
    """(windows, layers) to (layers,)."""
    is_known = ~np.isnan(values)
    total = np.where(is_known, values, 0.0).sum(axis=0)
    count = is_known.sum(axis=0)
    mean: Reals = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return mean


def served_imbalance(served: ServedWindows) -> Reals:
    """(layers,): imbalance, mean over windows."""
    return _mean_of_known(
        np.array([layout_load("", windows, by).by_rank.imbalance for windows, by in served])
    )


def step_factor(question: AdviceInputs, imbalance: Reals) -> float:
    """Step time over that of balanced ranks, from (layers,) imbalance: mean over layers."""
    return mean_known(question.zone.factor(1.0 + imbalance))


def faster_way(
    question: AdviceInputs, once: ServedWindows, following: ServedWindows
) -> ServedWindows:
    """One plan, or plans of the window before where these are faster by `LEAST_GAIN`."""
    if not following:
        return once
    one_plan, plans = (step_factor(question, served_imbalance(way)) for way in (once, following))
    return following if plans <= (1 - LEAST_GAIN) * one_plan else once


def step_rows(question: AdviceInputs, split: TrainTestSplit) -> int:
    """Rows of a layer in a step, over all ranks: as asked for, or those of a window."""
    return question.step_rows or split.rows


def layer_seconds(
    question: AdviceInputs, split: TrainTestSplit, served: ServedWindows
) -> Reals | None:
    """(layers,): seconds of a step on the slowest rank; None without hardware and an expert."""
    roofline = question.roofline
    if roofline is None:
        return None
    scale = step_rows(question, split) / split.rows
    mean: Reals = np.mean([roofline.layers(windows, by, scale) for windows, by in served], axis=0)
    return mean


def step_seconds(
    question: AdviceInputs, split: TrainTestSplit, served: ServedWindows
) -> float | None:
    """Of all layers."""
    seconds = layer_seconds(question, split, served)
    return None if seconds is None else float(seconds.sum())
