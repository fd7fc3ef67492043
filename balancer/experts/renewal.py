"""What becomes of shares between two epochs."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from equipoise.balancer.experts.following import Follower
from equipoise.balancer.experts.installed import Installed
from equipoise.balancer.experts.load import LoadWindow
from equipoise.balancer.experts.placement import Shape, Shares
from equipoise.balancer.experts.planner import Layout, Proposal


class ShareRenewal(Protocol):
    """Called at every boundary, on every rank alike."""

    def boundary(self, summed: bool) -> None:
        """`summed`: a new sub-window's load has just been taken."""
        ...

    def adopt(self, proposal: Proposal) -> Layout:
        """What an epoch installs: the proposal, or the proposal with fresher shares."""
        ...

    def close(self) -> None:
        """End what runs in the background; bounded."""
        ...


class KeepShares:
    """Static and exact modes: the tables' shares change only with an epoch."""

    def boundary(self, summed: bool) -> None:
        """Nothing to do."""

    def adopt(self, proposal: Proposal) -> Layout:
        """As proposed."""
        return proposal.layout

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class Resting:
    """No solution is under way."""


@dataclass(frozen=True)
class Solving:
    """Shares for `layout` are being solved; due at the next boundary."""

    layout: Layout
    better: Future[Shares | None]


class LaggedShares:
    """Solves shares again from each summed sub-window, off the step path.

    The solution is taken one boundary after its sum on every rank, from the same integers, so all
    ranks renew at the same step without a vote; if an epoch has replaced the placement in
    between, the solution is dropped, again everywhere.
    """

    def __init__(
        self, installed: Installed, load: LoadWindow, shape: Shape, hysteresis: int, deadline: float
    ) -> None:
        self._installed = installed
        self._load = load
        self._follower = Follower(shape, hysteresis, planned=load.sums.maxlen or 1)
        self._deadline = deadline
        self._state: Resting | Solving = Resting()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="equipoise.shares")

    def boundary(self, summed: bool) -> None:
        """Install the solution that is due, then start on the new sum."""
        self._take()
        if summed:
            layout = self._installed.layout
            better = self._worker.submit(self._follower.better, self._load.latest, layout)
            self._state = Solving(layout, better)

    def adopt(self, proposal: Proposal) -> Layout:
        """Layers whose placement stays keep their shares, which are fresher than the plan's.

        Every rank has the same shares installed at the same boundary, so all adopt the same.
        """
        shares = self._installed.layout.shares.copy()
        changed = list(proposal.changed)
        shares[changed] = proposal.layout.shares[changed]
        return Layout(proposal.layout.placement, shares)

    def close(self) -> None:
        """End the worker."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> None:
        match self._state:
            case Solving(layout, better):
                shares = better.result(self._deadline)
                self._state = Resting()
                if shares is not None and self._installed.layout is layout:
                    self._installed.renew_shares(shares)
