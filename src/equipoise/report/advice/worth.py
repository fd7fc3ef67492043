"""Is balancing worth it for this load?"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.report.advice.hardware import shipped_hardware
from equipoise.report.advice.inputs import AdviceInputs, TrainTestSplit, step_rows, step_seconds
from equipoise.report.placement.spread import Reals, mean_known

NOISE_MARGIN = 0.25
"""Imbalance that is above the floor by such a part of it may be chance as well."""
LEAST_GAIN = 0.02
"""Of the experts' time: below it is not worth a change of placement."""


class Verdict(StrEnum):
    """Whether to balance."""

    WORTH = "worth it"
    NOISE = "not worth it: what is uneven now is chance"
    SMALL = "not worth it: hardly anything is gained"


@dataclass(frozen=True)
class ServingOption:
    """One way to serve the load.

    Attributes:
        name: for people.
        planned: imbalance of the rows planned on, mean over layers; None where it makes no sense.
        measured: imbalance of the windows measured on, (layers,), NaN where a layer had no rows.
        seconds: of all layers of a step on the slowest ranks; None without hardware.
    """

    name: str
    planned: float | None
    measured: Reals
    seconds: float | None = None

    @property
    def mean(self) -> float:
        """Imbalance, mean over layers."""
        return mean_known(self.measured)

    @property
    def worst(self) -> float:
        """Imbalance of the most uneven layer."""
        return float(np.nanmax(self.measured))


@dataclass(frozen=True)
class Worth:
    """Ways to serve the load: now, greedy, planned, and planned with local and with exact shares.

    Attributes:
        options: as above.
        floor: imbalance that chance leaves of a window's rows on balanced ranks.
        step_floor: the same of a step's rows.
        verdict: whether to balance.
        few_rows: rows of an expert in a step, where they are fewer than any known hardware needs to
            be busy computing; None where not.
    """

    options: tuple[ServingOption, ...]
    floor: float
    step_floor: float
    verdict: Verdict
    few_rows: float | None

    @property
    def now(self) -> ServingOption:
        """What runs."""
        return self.options[0]

    @property
    def planned(self) -> ServingOption:
        """What would run."""
        return self.options[2]

    @property
    def greedy_gain(self) -> float:
        """Part of the slowest rank's rows that the public rule saves compared with the plan.

        0 where that is hardly anything: what is planned on is not what comes, and the plan, which
        levels the former better, may be the worse guess.
        """
        saved = rows_saved(self.planned.mean, self.options[1].mean)
        return saved if saved >= LEAST_GAIN else 0.0

    @property
    def gain(self) -> float:
        """Part of the experts' time that the plan saves."""
        return time_saved(self.now, self.planned)


def rows_saved(before: float, after: float) -> float:
    """1 - (1 + after) / (1 + before): the slowest rank has 1 + imbalance times the mean rows."""
    return 1 - (1 + after) / (1 + before)


def time_saved(before: ServingOption, after: ServingOption) -> float:
    """Part of the experts' time saved: by the roofline, or as if time went with rows without it."""
    if before.seconds and after.seconds is not None:
        return 1 - after.seconds / before.seconds
    return rows_saved(before.mean, after.mean)


def judge_worth(now: float, floor: float, saved: float) -> Verdict:
    """Of an imbalance, what chance leaves of the same rows, and the part of time that is saved."""
    if now <= floor * (1 + NOISE_MARGIN):
        return Verdict.NOISE
    return Verdict.SMALL if saved < LEAST_GAIN else Verdict.WORTH


@dataclass(frozen=True)
class CandidateLayouts:
    """Where experts are now, where the public rule would put them, and where the plan does.

    All of the layers of the statistics.
    """

    now: ExpertPlacement
    greedy: ExpertPlacement
    planned: ExpertPlacement


def worth(question: AdviceInputs, split: TrainTestSplit, layouts: CandidateLayouts) -> Worth:
    """Raises `PlacementError`."""
    steps = step_rows(question, split)
    planned = layouts.planned
    ranks = planned.ranks
    ways = [
        _way(question, split, "now", layouts.now),
        _way(question, split, "greedy, even split", layouts.greedy),
        _way(question, split, "planned", planned),
        ServingOption(
            "local shares",
            None,
            split.imbalance_with_local_shares(planned.placement, ranks, steps),
        ),
        ServingOption(
            "shares by window", None, split.imbalance_with_exact_shares(planned.placement, ranks)
        ),
    ]
    floor = split.chance_imbalance(ranks, split.rows)
    return Worth(
        tuple(ways),
        floor,
        split.chance_imbalance(ranks, steps),
        judge_worth(ways[0].mean, floor, time_saved(ways[0], ways[2])),
        _few(steps / question.statistics.experts),
    )


def _way(
    question: AdviceInputs, split: TrainTestSplit, name: str, layout: ExpertPlacement
) -> ServingOption:
    seconds = step_seconds(question, split, layout)
    return ServingOption(
        name, split.planned_imbalance(layout), split.measured_imbalance(layout), seconds
    )


def _few(rows: float) -> float | None:
    """The rows, where they are below the least ridge of all hardware that is known."""
    least = min(hardware.ridge("bf16") for hardware in shipped_hardware().values())
    return rows if rows < least else None
