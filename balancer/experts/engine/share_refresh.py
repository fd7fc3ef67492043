"""Updates the shares of replicas between two rebalances."""

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
    """Updates shares; called at every boundary that has work, on all ranks alike."""

    @property
    def pending(self) -> bool:
        """Whether the next boundary has work."""
        ...

    def before_step(self, summed: bool) -> Job[None]:
        """Runs a boundary; `summed`: the load of a sub-window has just been taken."""
        ...

    def apply_plan_shares(self, layout: Layout) -> None:
        """Applies the shares of an agreed plan to layers whose placement stays."""
        ...


class StaticShares:
    """Static and exact modes: the tables' shares change only with a rebalance.

    Args:
        serving_state: slots, tables and layout of this rank.
        shape: numbers of layers, experts, slots and ranks.
    """

    pending = False

    def __init__(self, serving_state: ServingState, shape: ExpertShape) -> None:
        self._serving_state = serving_state
        self._shape = shape

    def before_step(self, summed: bool) -> Job[None]:
        """Does nothing."""
        yield from ()

    def apply_plan_shares(self, layout: Layout) -> None:
        """Gives layers that keep their placement the plan's shares, without moving weights."""
        update = share_update(self._serving_state.layout, layout, self._shape)
        if update is not None:
            self._serving_state.commit(update, ())


@dataclass(frozen=True)
class NotSolving:
    """No solution is under way."""


@dataclass(frozen=True)
class Solving:
    """Shares are being solved; due at the next boundary."""

    new_shares: JobHandle[LayerUpdate | None]


class LaggedShares:
    """Solves shares again from the load of each sub-window, on a worker.

    All ranks solve the same integers and install the solution one boundary after the sum, so they
    change shares at the same step without a vote. Layers that a rebalance changed in between keep
    the shares of the rebalance, again on all ranks.

    Args:
        serving_state: slots, tables and layout of this rank.
        load: the load over all ranks.
        shape: numbers of layers, experts, slots and ranks.
        drift_threshold: imbalance in parts per 65536 that installed shares may cost before
            traffic counts as changed.
        worker: solves.
    """

    def __init__(
        self,
        serving_state: ServingState,
        load: LoadWindow,
        shape: ExpertShape,
        drift_threshold: int,
        worker: Worker,
    ) -> None:
        self._serving_state = serving_state
        self._load = load
        self._shape = shape
        self._drift_detector = DriftDetector(shape, drift_threshold, planned=load.sums.maxlen or 1)
        self._state: NotSolving | Solving = NotSolving()
        self._worker = worker

    @property
    def pending(self) -> bool:
        """Whether a solution is due at the next boundary."""
        return isinstance(self._state, Solving)

    def before_step(self, summed: bool) -> Job[None]:
        """Installs the solution that is due, then starts to solve the new sum.

        Raises `VoteOutcomeUnknown` if the solution failed or is late.
        """
        # The due solution first: a new sum may come at the same boundary, and replaces the state.
        yield from self._install_solution()
        if summed:
            load, layout = self._load.latest, self._serving_state.layout
            solve = immediate(lambda: self._solve(load, layout))
            self._state = Solving(self._worker.start(solve, "shares"))

    def apply_plan_shares(self, layout: Layout) -> None:
        """Does nothing: installed shares are newer than the plan's."""

    def _solve(self, load: Load, layout: Layout) -> LayerUpdate | None:
        shares = self._drift_detector.new_shares(load, layout)
        if shares is None:
            return None
        return share_update(layout, replace(layout, shares=shares), self._shape)

    def _install_solution(self) -> Job[None]:
        if not isinstance(self._state, Solving):
            return
        try:
            update = yield JobDone(self._state.new_shares)
        except Exception as error:
            # Other ranks may have installed theirs, and there is no vote: this rank has to stop.
            reason = "not in time" if isinstance(error, TimeoutError) else str(error)
            raise VoteOutcomeUnknown(f"shares were not solved on this rank: {reason}") from error
        self._state = NotSolving()
        fitting = None if update is None else update.restricted_to(self._serving_state.layout)
        if fitting is not None:
            self._serving_state.commit(fitting, ())


def share_update(installed: Layout, proposed: Layout, shape: ExpertShape) -> LayerUpdate | None:
    """Returns an update of the layers that keep their placement and get other shares, or None."""
    stays = (installed.placement == proposed.placement).all(axis=1)
    differs = (installed.shares != proposed.shares).any(axis=1)
    layers = np.flatnonzero(stays & differs).tolist()
    return layer_update(proposed, shape, layers) if layers else None
