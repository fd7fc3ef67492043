"""The in-place path: layers are rewritten from the host's memory, a few per step.

Every rank writes its own slots, so nothing travels between ranks, and no staging is needed. The
vote compares placement, shares, tables and the checksums of the weights. After it there is no
abort: a write that goes wrong is repeated once, then this rank stops.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from equipoise import _native
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.engine.states import Finished, RebalanceId, Updating
from equipoise.balancer.experts.placement import ExpertShape, Layout, Load, Placement
from equipoise.balancer.experts.planning.proposal import Proposal, in_place_proposal
from equipoise.balancer.experts.planning.rebalance_plan import limits_of, plan_rebalance
from equipoise.balancer.experts.routing.layer_update import LayerUpdate
from equipoise.balancer.experts.runtime.jobs import Job, JobHandle, LockReleased
from equipoise.balancer.experts.runtime.workers import Worker
from equipoise.balancer.experts.transfer.host_writes import HostWeights, write_and_verify
from equipoise.balancer.experts.transfer.layer_locks import LayerLocks
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import LockPoisoned, VoteOutcomeUnknown


class InPlacePath:
    """Rewrites layers under their locks, on one rank.

    Group k of an epoch that was agreed on at boundary s is handed over in step s + k, and its
    tables are installed at boundary s + k + 1; all ranks count alike, so no further word is needed.

    Args:
        accelerator: whose copy stream sums what was written.
        installed: what this rank holds.
        gates: the locks of its layers.
        supply: the weights, and who writes them.
        worker: writes one group after another.
        rank: this rank.
        shape: how many of everything.
        config: bounds and cadence.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        installed: ServingState,
        gates: LayerLocks,
        supply: HostWeights,
        worker: Worker,
        rank: int,
        shape: ExpertShape,
        config: BalancerConfig,
    ) -> None:
        self._accelerator = accelerator
        self._serving_state = installed
        self._layer_locks = gates
        self._host_weights = supply
        self._worker = worker
        self._own_slots = slice(rank * shape.slots_per_rank, (rank + 1) * shape.slots_per_rank)
        self._shape = shape
        self._config = config
        self._previous_placement = installed.layout.placement

    def propose(self, windows: Load, layout: Layout) -> Proposal:
        """Plan; runs beside the forward. Raises `PlacementError`."""
        limits = limits_of(self._config, self._shape.slots_per_rank)
        drafted = plan_rebalance(windows, layout, self._shape, limits)
        return in_place_proposal(drafted, self._shape, self._config.layer_updates_per_iter)

    def start(self, epoch: RebalanceId, proposal: Proposal, step: int) -> Updating | Finished:
        """Every rank has the same proposal, at the boundary before `step`: hand over group 0."""
        first = {
            layer: step + group
            for group, change in enumerate(proposal.layer_updates)
            for layer in change.layers
        }
        self._layer_locks.schedule(first)
        self._previous_placement = self._serving_state.layout.placement
        return self.advance(Updating(self, epoch, proposal, step, ()), step)

    def advance(self, state: Updating, step: int) -> Updating | Finished:
        """Install the tables of the group whose second step this is, and hand over the next.

        Raises:
            AgreementLost: a write failed, or came too late: the last step's output is void, and
                this rank stops.
        """
        self._check(state)
        group, changes = step - state.first_step, state.proposal.layer_updates
        if 0 < group <= len(changes):
            self._serving_state.commit(changes[group - 1], ())
        if group < len(changes):
            return self._hand_over(state, changes[group])
        if group > len(changes) and self._locks_drained(state):
            self._layer_locks.schedule({})
            proposal = state.proposal
            return Finished(
                state.rebalance, len(proposal.plan.changed_layers), self._remote_copies(proposal)
            )
        return state

    def repair(self, reason: str) -> tuple[JobHandle[None], ...]:
        """Nothing of this path breaks in an epoch that is aborted."""
        return ()

    def _check(self, state: Updating) -> None:
        """Raise for what has gone wrong behind the decision."""
        for task in state.writes:
            if task.done() and (error := task.exception()) is not None:
                raise VoteOutcomeUnknown(
                    f"epoch {state.rebalance.number}: write failed: {error}"
                ) from error
        try:
            self._layer_locks.check()
        except LockPoisoned as error:
            raise VoteOutcomeUnknown(f"epoch {state.rebalance.number}: {error}") from error

    def _hand_over(self, state: Updating, change: LayerUpdate) -> Updating:
        """Let the step that begins read these layers once more; they are written behind it.

        The first signals are given here and not by the worker, which may still wait for a layer
        that this very step reads later.
        """
        epochs = {layer: self._layer_locks.locks[layer].epoch for layer in change.layers}
        for layer, epoch in epochs.items():
            self._layer_locks.locks[layer].signal(epoch)
        job = self._rewrite(change, epochs, state.proposal.layout)
        layers = list(change.layers)
        task = self._worker.start(job, "move", epoch=state.rebalance.number, layers=layers)
        return replace(state, writes=(*state.writes, task))

    def _locks_drained(self, state: Updating) -> bool:
        """Whether all that was written has been read once, so that the locks are as at first."""
        if not all(task.done() for task in state.writes):
            return False
        layers = [layer for change in state.proposal.layer_updates for layer in change.layers]
        return all(self._layer_locks.is_drained(layer) for layer in layers)

    def _rewrite(self, change: LayerUpdate, epochs: Mapping[int, int], layout: Layout) -> Job[None]:
        """Write each layer of a group once its step has read it, and let the next step read it."""
        try:
            for layer in change.layers:
                yield LockReleased(self._layer_locks.locks[layer])
                yield from self._write_slots(layer, layout.placement)
                self._layer_locks.locks[layer].signal(epochs[layer])
        except BaseException:
            self._layer_locks.poison(change.layers)
            raise

    def _write_slots(self, layer: int, placement: Placement) -> Job[None]:
        """Write what changes of this rank's slots of a layer."""
        mine = placement[layer, self._own_slots]
        places = np.flatnonzero(mine != self._previous_placement[layer, self._own_slots])
        slots = (layer * self._shape.slots_per_rank + places).tolist()
        store, experts = self._serving_state.store, mine[places].tolist()
        return write_and_verify(self._accelerator, store, self._host_weights, layer, slots, experts)

    def _remote_copies(self, proposal: Proposal) -> int:
        """Copies that a rank did not hold, over all ranks."""
        return _native.count_moves(
            self._previous_placement, proposal.layout.placement, self._shape.ranks
        )
