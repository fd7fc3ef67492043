"""What becomes of shares between two epochs."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.load_window import LoadWindow
from equipoise.balancer.experts.placement import ExpertShape, Layout, Load
from equipoise.balancer.experts.routing.drift import DriftDetector
from equipoise.balancer.experts.routing.layer_update import LayerUpdate, layer_update
from equipoise.balancer.experts.runtime.jobs import Job, JobDone, JobHandle, immediate
from equipoise.balancer.experts.runtime.workers import Worker
from equipoise.hal.errors import VoteOutcomeUnknown


class ShareRefresh(Protocol):
    """Called at every boundary at which there is something to do, on every rank alike."""

    @property
    def pending(self) -> bool:
        """Whether the next boundary has to be told of."""
        ...

    def before_step(self, summed: bool) -> Job[None]:
        """`summed`: a new sub-window's load has just been taken."""
        ...

    def apply_plan_shares(self, layout: Layout) -> None:
        """An epoch was agreed on that has shares for layers whose placement stays, too."""
        ...


class StaticShares:
    """Static and exact modes: the tables' shares change only with an epoch.

    Args:
        installed: what this rank holds.
        shape: how many of everything.
    """

    pending = False

    def __init__(self, installed: ServingState, shape: ExpertShape) -> None:
        self._serving_state = installed
        self._shape = shape

    def before_step(self, summed: bool) -> Job[None]:
        """Nothing to do."""
        yield from ()

    def apply_plan_shares(self, layout: Layout) -> None:
        """Layers that keep their placement get the plan's shares, which cost no weight."""
        change = share_update(self._serving_state.layout, layout, self._shape)
        if change is not None:
            self._serving_state.commit(change, ())


@dataclass(frozen=True)
class NotSolving:
    """No solution is under way."""


@dataclass(frozen=True)
class Solving:
    """Shares are being solved; due at the next boundary."""

    new_shares: JobHandle[LayerUpdate | None]


class LaggedShares:
    """Solves shares again from each summed sub-window, off the step path.

    The solution is taken one boundary after its sum on every rank, from the same integers, so all
    ranks renew at the same step without a vote; layers that an epoch has changed in between keep
    what the epoch gave them, again everywhere.

    Args:
        installed: what this rank holds.
        load: global loads.
        shape: how many of everything.
        hysteresis: parts per 65536 that installed shares may miss before traffic has changed.
        worker: solves.
    """

    def __init__(
        self,
        installed: ServingState,
        load: LoadWindow,
        shape: ExpertShape,
        hysteresis: int,
        worker: Worker,
    ) -> None:
        self._serving_state = installed
        self._load = load
        self._shape = shape
        self._drift_detector = DriftDetector(shape, hysteresis, planned=load.sums.maxlen or 1)
        self._state: NotSolving | Solving = NotSolving()
        self._worker = worker

    @property
    def pending(self) -> bool:
        """Whether a solution is due at the next boundary."""
        return isinstance(self._state, Solving)

    def before_step(self, summed: bool) -> Job[None]:
        """Install the solution that is due, then start on the new sum.

        Raises `VoteOutcomeUnknown` where the solution does not come.
        """
        yield from self._install_solution()
        if summed:
            load, layout = self._load.latest, self._serving_state.layout
            solve = immediate(lambda: self._solve(load, layout))
            self._state = Solving(self._worker.start(solve, "shares"))

    def apply_plan_shares(self, layout: Layout) -> None:
        """Shares of layers that keep their placement are fresher than the plan's."""

    def _solve(self, load: Load, layout: Layout) -> LayerUpdate | None:
        shares = self._drift_detector.new_shares(load, layout)
        if shares is None:
            return None
        return share_update(layout, replace(layout, shares=shares), self._shape)

    def _install_solution(self) -> Job[None]:
        if not isinstance(self._state, Solving):
            return
        try:
            change = yield JobDone(self._state.new_shares)
        except Exception as error:
            # Other ranks may have renewed theirs, and nobody votes on it: this rank cannot go on.
            why = "not in time" if isinstance(error, TimeoutError) else str(error)
            raise VoteOutcomeUnknown(f"shares were not solved on this rank: {why}") from error
        self._state = NotSolving()
        fitting = None if change is None else change.restricted_to(self._serving_state.layout)
        if fitting is not None:
            self._serving_state.commit(fitting, ())


def share_update(installed: Layout, wanted: Layout, shape: ExpertShape) -> LayerUpdate | None:
    """Other shares for the layers that keep their placement; None where there are none."""
    stays = (installed.placement == wanted.placement).all(axis=1)
    differs = (installed.shares != wanted.shares).any(axis=1)
    layers = np.flatnonzero(stays & differs).tolist()
    return layer_update(wanted, shape, layers) if layers else None
