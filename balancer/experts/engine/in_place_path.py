"""The in-place path: layers are rewritten from host memory, a few per step.

Every rank writes its own slots, so nothing is transferred between ranks, and no staging is needed.
The vote compares placement, shares, tables and the checksums of the weights. After it there is no
abort: a write that fails is repeated once, then this rank stops.
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

    Update k of a rebalance that was agreed on at boundary s is handed over in step s + k, and its
    tables are committed at boundary s + k + 1. All ranks count steps alike, so no further vote is
    needed.

    Args:
        accelerator: its copy stream computes the checksums of written slots.
        serving_state: slots, tables and layout of this rank.
        layer_locks: the locks of its layers.
        host_weights: the weights and their writer.
        worker: writes one update after another.
        rank: this rank.
        shape: numbers of layers, experts, slots and ranks.
        config: bounds and intervals.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        serving_state: ServingState,
        layer_locks: LayerLocks,
        host_weights: HostWeights,
        worker: Worker,
        rank: int,
        shape: ExpertShape,
        config: BalancerConfig,
    ) -> None:
        self._accelerator = accelerator
        self._serving_state = serving_state
        self._layer_locks = layer_locks
        self._host_weights = host_weights
        self._worker = worker
        self._own_slots = slice(rank * shape.slots_per_rank, (rank + 1) * shape.slots_per_rank)
        self._shape = shape
        self._config = config
        self._previous_placement = serving_state.layout.placement

    def propose(self, windows: Load, layout: Layout) -> Proposal:
        """Plans, overlapped with the forward pass. Raises `PlacementError`."""
        limits = limits_of(self._config, self._shape.slots_per_rank)
        plan = plan_rebalance(windows, layout, self._shape, limits)
        return in_place_proposal(plan, self._shape, self._config.layer_updates_per_iter)

    def start(self, rebalance: RebalanceId, proposal: Proposal, step: int) -> Updating | Finished:
        """Hands over update 0, at the boundary before `step`; all ranks have the proposal."""
        first = {
            layer: step + number
            for number, update in enumerate(proposal.layer_updates)
            for layer in update.layers
        }
        self._layer_locks.schedule(first)
        self._previous_placement = self._serving_state.layout.placement
        return self.advance(Updating(self, rebalance, proposal, step, ()), step)

    def advance(self, state: Updating, step: int) -> Updating | Finished:
        """Commits the tables of the update whose second step this is, and hands over the next.

        Raises:
            VoteOutcomeUnknown: a write failed, or came too late: the last step's output is invalid,
                and this rank stops.
        """
        self._check(state)
        number, updates = step - state.first_step, state.proposal.layer_updates
        if 0 < number <= len(updates):
            self._serving_state.commit(updates[number - 1], ())
        if number < len(updates):
            return self._hand_over(state, updates[number])
        if number > len(updates) and self._locks_drained(state):
            self._layer_locks.schedule({})
            proposal = state.proposal
            return Finished(
                state.rebalance, len(proposal.plan.changed_layers), self._remote_copies(proposal)
            )
        return state

    def repair(self, reason: str) -> tuple[JobHandle[None], ...]:
        """Returns no job: an abort comes before the first write, so there is nothing to repair."""
        return ()

    def _check(self, state: Updating) -> None:
        """Raises if a write failed, or a lock was poisoned, since the vote."""
        for handle in state.writes:
            if handle.done() and (error := handle.exception()) is not None:
                raise VoteOutcomeUnknown(
                    f"rebalance {state.rebalance.number}: write failed: {error}"
                ) from error
        try:
            self._layer_locks.check()
        except LockPoisoned as error:
            raise VoteOutcomeUnknown(f"rebalance {state.rebalance.number}: {error}") from error

    def _hand_over(self, state: Updating, update: LayerUpdate) -> Updating:
        """Lets the step that begins read these layers once more; they are written after that."""
        # Signalled here, not by the worker: it may still wait for a layer that this step reads
        # later, and the step would then wait for the worker.
        epochs = {layer: self._layer_locks.locks[layer].epoch for layer in update.layers}
        for layer, epoch in epochs.items():
            self._layer_locks.locks[layer].signal(epoch)
        job = self._rewrite(update, epochs, state.proposal.layout)
        layers = list(update.layers)
        handle = self._worker.start(job, "move", rebalance=state.rebalance.number, layers=layers)
        return replace(state, writes=(*state.writes, handle))

    def _locks_drained(self, state: Updating) -> bool:
        """Returns whether all written layers were read once, so that the locks are free again."""
        if not all(handle.done() for handle in state.writes):
            return False
        layers = [layer for update in state.proposal.layer_updates for layer in update.layers]
        return all(self._layer_locks.is_drained(layer) for layer in layers)

    def _rewrite(self, update: LayerUpdate, epochs: Mapping[int, int], layout: Layout) -> Job[None]:
        """Writes each layer of an update after its step has read it, for the next step to read."""
        try:
            for layer in update.layers:
                yield LockReleased(self._layer_locks.locks[layer])
                yield from self._write_slots(layer, layout.placement)
                self._layer_locks.locks[layer].signal(epochs[layer])
        except BaseException:
            # Otherwise the next step would wait for these layers until its timeout.
            self._layer_locks.poison(update.layers)
            raise

    def _write_slots(self, layer: int, placement: Placement) -> Job[None]:
        """Writes the slots of this rank that change in a layer."""
        own_experts = placement[layer, self._own_slots]
        positions = np.flatnonzero(own_experts != self._previous_placement[layer, self._own_slots])
        slots = (layer * self._shape.slots_per_rank + positions).tolist()
        store, experts = self._serving_state.store, own_experts[positions].tolist()
        return write_and_verify(self._accelerator, store, self._host_weights, layer, slots, experts)

    def _remote_copies(self, proposal: Proposal) -> int:
        """Counts the slots whose expert the rank did not hold before, over all ranks."""
        return _native.count_moves(
            self._previous_placement, proposal.layout.placement, self._shape.ranks
        )
