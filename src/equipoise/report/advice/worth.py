"""Is balancing worth it for this load?"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.report.advice.hardware import shipped_hardware
from equipoise.report.advice.inputs import (
    LEAST_GAIN,
    AdviceInputs,
    ServedWindows,
    TrainTestSplit,
    served_imbalance,
    step_factor,
    step_rows,
    step_seconds,
)
from equipoise.report.placement.spread import Reals, mean_known

NOISE_MARGIN = 0.25
"""Imbalance that is above the floor by such a part of it may be chance as well."""


class Verdict(StrEnum):
    """Whether to balance."""

    WORTH = "worth it"
    NOISE = "not worth it: what is uneven now is chance"
    DEAD_ZONE = "not worth it: step time does not depend on it"
    KV_CACHE = "not worth it: redundant slots cost too much KV cache"
    SHIFTS = "not worth it: the load changes from window to window"
    SMALL = "not worth it: hardly anything is gained"


class Cadence(StrEnum):
    """When to plan anew, by what later windows show."""

    ANY = "a plan of the last window does as well as one of all"
    ONCE = "plan once, over all traffic: plans of single windows do worse"
    FOLLOWING = "rebalance as the load changes: no plan of it all holds"
    UNKNOWN = "one window does not tell"


@dataclass(frozen=True)
class ServingOption:
    """One way to serve the load.

    Attributes:
        name: for people.
        planned: imbalance of the rows planned on, mean over layers; None where it makes no sense.
        measured: imbalance of the windows measured on, (layers,), NaN where a layer had no rows.
        step: step time over that of balanced ranks, by the dead zone.
        seconds: of all layers of a step on the slowest ranks; None without hardware.
        before: what it is compared with, where that is not `now` in the same windows: the same
            steps as they are served now.
    """

    name: str
    planned: float | None
    measured: Reals
    step: float
    seconds: float | None = None
    before: "ServingOption | None" = None

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
        options: as above; then, where windows follow one another, plans of the window before.
        running: requests that run with the slots of the plan over those that run now.
        floor: imbalance that chance leaves of a window's rows on balanced ranks.
        step_floor: the same of a step's rows.
        verdict: whether to balance.
        few_rows: rows of an expert in a step, where they are fewer than any known hardware needs to
            be busy computing; None where not.
    """

    options: tuple[ServingOption, ...]
    running: float
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
    def following(self) -> ServingOption | None:
        """Plans of the window before, where there are any."""
        return self.options[5] if len(self.options) > 5 else None

    @property
    def cadence(self) -> Cadence:
        """When to plan anew."""
        if self.following is None:
            return Cadence.UNKNOWN
        ratio = self.following.step / self.planned.step
        if ratio <= 1 - LEAST_GAIN:
            return Cadence.FOLLOWING
        return Cadence.ONCE if ratio >= 1 + LEAST_GAIN else Cadence.ANY

    @property
    def greedy_gain(self) -> float:
        """Part of the slowest rank's rows that the public rule saves compared with the plan.

        0 where that is hardly anything: what is planned on is not what comes, and the plan, which
        levels the former better, may be the worse guess.
        """
        saved = rows_saved(self.planned.mean, self.options[1].mean)
        return saved if saved >= LEAST_GAIN else 0.0

    @property
    def best(self) -> ServingOption:
        """The plan, or plans of the window before where those are faster by `LEAST_GAIN`."""
        if self.following is not None and self.cadence is Cadence.FOLLOWING:
            return self.following
        return self.planned

    @property
    def gain(self) -> float:
        """Part of throughput that `best` adds: requests that run, over the time of a step."""
        return self.running * self.now.step / self.best.step - 1


def rows_saved(before: float, after: float) -> float:
    """1 - (1 + after) / (1 + before): the slowest rank has 1 + imbalance times the mean rows."""
    return 1 - (1 + after) / (1 + before)


def time_saved(before: ServingOption, after: ServingOption) -> float | None:
    """Part of the experts' time saved, by the roofline; None without it."""
    if before.seconds and after.seconds is not None:
        return 1 - after.seconds / before.seconds
    return None


@dataclass(frozen=True)
class CandidateLayouts:
    """Where experts are now, where the public rule would put them, and where the plan does.

    All of the layers of the statistics.
    """

    now: ExpertPlacement
    greedy: ExpertPlacement
    planned: ExpertPlacement


def worth(
    question: AdviceInputs, split: TrainTestSplit, layouts: CandidateLayouts, best_step: float
) -> Worth:
    """`best_step` is the least `step` of any number of slots. Raises `PlacementError`."""
    steps = step_rows(question, split)
    planned = layouts.planned
    ranks = planned.ranks
    local, unlevelled = split.imbalance_of_steps(planned.placement, layouts.now, steps)
    before = ServingOption("now", None, unlevelled, step_factor(question, unlevelled))
    exact = split.imbalance_with_exact_shares(planned.placement, ranks)
    options = [
        _option(question, split, "now", split.once(layouts.now), layouts.now),
        _option(question, split, "greedy, even split", split.once(layouts.greedy), layouts.greedy),
        _option(question, split, "planned", split.once(planned), planned),
        ServingOption("local shares", None, local, step_factor(question, local), before=before),
        ServingOption("shares by window", None, exact, step_factor(question, exact)),
    ]
    if following := split.following(planned.slots, ranks):
        options.append(_option(question, split, "last window's plan", following))
    without_verdict = Worth(
        tuple(options),
        question.running_requests(planned.slots),
        split.chance_imbalance(ranks, split.rows),
        split.chance_imbalance(ranks, steps),
        Verdict.WORTH,
        _few(steps / question.statistics.experts),
    )
    return replace(without_verdict, verdict=judge_worth(without_verdict, question, best_step))


def judge_worth(worth: Worth, question: AdviceInputs, best_step: float) -> Verdict:
    """Whether to balance, from all but the verdict of `worth`; why not, where not."""
    now, planned = worth.now, worth.planned
    # Fewer slots let more requests run, however level the load is.
    more_run = worth.running > 1 and worth.gain >= LEAST_GAIN
    if now.mean <= worth.floor * (1 + NOISE_MARGIN) and not more_run:
        return Verdict.NOISE
    saved = time_saved(now, worth.best)
    if worth.gain >= LEAST_GAIN and (saved is None or saved >= LEAST_GAIN):
        return Verdict.WORTH
    if worth.gain >= LEAST_GAIN:
        return Verdict.SMALL
    if 1 + now.mean <= question.zone.knee:
        return Verdict.DEAD_ZONE
    if question.kv_cache is not None and now.step / best_step - 1 >= LEAST_GAIN:
        return Verdict.KV_CACHE
    as_planned = question.zone.factor(1 + (planned.planned or 0.0))
    if now.step / as_planned - 1 >= LEAST_GAIN:
        return Verdict.SHIFTS
    return Verdict.SMALL


def _option(
    question: AdviceInputs,
    split: TrainTestSplit,
    name: str,
    served: ServedWindows,
    layout: ExpertPlacement | None = None,
) -> ServingOption:
    measured = served_imbalance(served)
    return ServingOption(
        name,
        None if layout is None else split.planned_imbalance(layout),
        measured,
        step_factor(question, measured),
        step_seconds(question, split, served),
    )


def _few(rows: float) -> float | None:
    """The rows, where they are below the least ridge of all hardware that is known."""
    least = min(hardware.ridge("bf16") for hardware in shipped_hardware().values())
    return rows if rows < least else None
