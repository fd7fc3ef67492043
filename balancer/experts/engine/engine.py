"""The engine: rebalances while the model serves, in lockstep with every other rank.

Every rank calls `before_step(step)` before each step, and `after_launch()` once the step's forward
pass is launched. During a rebalance, each boundary settles the vote that was started after the
previous boundary; the next vote starts after the launch. With expert parallelism this needs no
wait: a rank that has finished a step knows that every peer has begun that step, hence has cast its
ballot.
States: `balancer/experts/engine/states.py`; protocol: `docs/design/engine.md`.
"""

import logging
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from equipoise.balancer.experts.agreement.ballot import (
    Abort,
    Ballot,
    Commit,
    Pending,
    RankStatus,
    StartTransfer,
    Verdict,
    VoteSpec,
    vote,
    vote_failed,
)
from equipoise.balancer.experts.agreement.key_collector import KeyCollector, StoredKey
from equipoise.balancer.experts.agreement.members import EPGroup
from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.engine.recorder import EventRecorder
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.engine.share_refresh import ShareRefresh
from equipoise.balancer.experts.engine.states import (
    START_TRANSFER,
    Draining,
    Failed,
    Finished,
    Idle,
    Planning,
    Proposed,
    RebalanceId,
    RebalanceReport,
    Staged,
    State,
    Transferring,
    Updating,
    Voting,
    ballot_of,
    copies_committed,
    last_progress_step,
    outcome_key,
    running_work,
    transfer_of,
)
from equipoise.balancer.experts.load_window import LoadWindow
from equipoise.balancer.experts.placement import Layout, Load, format_ranges
from equipoise.balancer.experts.planning.proposal import Proposal
from equipoise.balancer.experts.runtime.events import COMMITTED, UNCHANGED
from equipoise.balancer.experts.runtime.jobs import (
    Job,
    JobDone,
    JobHandle,
    immediate,
    run_blocking,
)
from equipoise.balancer.experts.runtime.workers import Workers
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import EngineError, VoteOutcomeUnknown
from equipoise.hal.shares import SHARE_ONE

MAX_REPORTS = 1024
"""Reports that are kept: the last ones, so that memory stays bounded."""
MAX_ABORT_REASONS = 256
"""Maximum number of distinct abort reasons that get their own counter: some name ranks, and there
are many sets of ranks."""
PLANNING_STALL_FACTOR = 16
"""A plan may take this many times `max_stalled_steps` steps. It takes seconds, however short a step
is (3.3 s for 60 layers of 384 experts on 320 ranks with `sigma`), and no step waits for it.
Rebalances that fall due meanwhile are skipped, and the plan is used. If it were aborted sooner, it
would still run when the next rebalance is due, which would then be aborted too, and so on."""
NOTABLE_IMBALANCE = 0.1
"""Left by a plan without redundant slots, it is worth a warning: the slowest rank takes a tenth
longer than the mean."""
OTHER_REASON = "another reason"
"""The counter of reasons beyond `MAX_ABORT_REASONS`."""
BEFORE_ANY_STEP = -1
"""Less than any step: after the close, every boundary is checked, and raises."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineContext:
    """The group of an engine.

    Attributes:
        control: the control plane for ballots and decisions.
        members: the ranks.
        first_step: the step of the first boundary.
        keys: deletes keys of finished votes; None if another member does.
    """

    control: ControlPlane
    members: EPGroup
    first_step: int
    keys: KeyCollector | None


class UpdatePath(Protocol):
    """How the weights of a rebalance get into slots: staged, or in place.

    The state that `start` returns determines which methods are called afterwards.
    """

    def propose(self, windows: Load, layout: Layout) -> Proposal:
        """Plans for the load of these windows; runs on a worker."""
        ...

    def start(
        self, rebalance: RebalanceId, proposal: Proposal, step: int
    ) -> Transferring | Updating | Finished:
        """Starts to install a proposal that all ranks share, at the boundary before `step`."""
        ...

    def repair(self, reason: str) -> tuple[JobHandle[None], ...]:
        """Starts repairs after all ranks aborted a rebalance for `reason`; returns their jobs."""
        ...


def imbalance_without_redundancy(proposal: Proposal, target: float) -> float | None:
    """Returns the imbalance (max/mean - 1, mean over layers) that a plan leaves because every
    expert has one slot; None where experts have more, or where little is left."""
    placement = proposal.layout.placement
    if placement.shape[1] > int(placement.max()) + 1:
        return None
    predicted = float(proposal.plan.predicted_imbalance.mean()) / SHARE_ONE
    return predicted if predicted > max(target, NOTABLE_IMBALANCE) else None


class RebalanceEngine:
    """Runs the rebalances of one rank. One thread calls its methods.

    Args:
        serving_state: slots, tables and layout of this rank.
        load: the load over all ranks.
        path: how weights get into slots; None to never rebalance.
        share_refresh: updates shares between rebalances.
        context: the group, and its first step.
        config: intervals and bounds.
        workers: run work overlapped with the forward pass.
        recorder: records what happens at boundaries that have work to do.
    """

    def __init__(
        self,
        serving_state: ServingState,
        load: LoadWindow,
        path: UpdatePath | None,
        share_refresh: ShareRefresh,
        context: EngineContext,
        config: BalancerConfig,
        workers: Workers,
        recorder: EventRecorder,
    ) -> None:
        self._serving_state = serving_state
        self._load = load
        self._path = path
        self._share_refresh = share_refresh
        self._control = context.control
        self._members = context.members
        self._keys = context.keys
        self._config = config
        self._workers = workers
        self._recorder = recorder
        self._state: State = Idle()
        self._vote: JobHandle[Verdict] | None = None
        self._next_step = context.first_step
        self._step_to_prepare: int | None = None
        self._closed = False
        self._warned_of_staging = False
        self._warned_of_missing_redundancy = False
        self.reports: deque[RebalanceReport] = deque(maxlen=MAX_REPORTS)
        self.aborts: Counter[str] = Counter()

    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    @property
    def half_written_layers(self) -> tuple[int, ...]:
        """Layers whose slots may hold old weights, new weights, or parts of both.

        Nonempty only during an in-place update; recovery needs it if the update ends half done.
        """
        if not isinstance(self._state, Updating):
            return ()
        begun = self._state.proposal.layer_updates[: len(self._state.writes)]
        return tuple(layer for update in begun for layer in update.layers)

    @property
    def uncollected(self) -> tuple[StoredKey, ...]:
        """Keys of votes that were not deleted, for the next engine; valid after the close."""
        return () if self._keys is None else self._keys.uncollected

    def before_step(self, step: int) -> None:
        """Runs the boundary before `step`: settles the due vote and acts on it.

        Most boundaries have no work and cost a comparison. Work that the forward pass need not wait
        for is done in `after_launch`, at the next boundary at the latest.

        Raises:
            VoteOutcomeUnknown: the outcome of a vote cannot be learnt; this rank must stop.
            EngineError: a boundary was left out, or the engine is closed.
        """
        if step < self._next_step:
            return
        if self._closed:
            raise EngineError(f"boundary {step} of an engine that was closed")
        self.after_launch()
        if step >= self._next_step:
            run_blocking(self.run_boundary(step), self._config.timeout)

    def after_launch(self) -> None:
        """Prepares the next boundary, once the forward pass after the last one is launched.

        Opens a rebalance if one is due, polls this rank's own work, casts the ballot and starts the
        queued jobs. Does nothing if the boundary had no work.
        """
        if self._step_to_prepare is None:
            return
        # Cleared first: a second call, or the one in `before_step`, must not vote twice.
        step, self._step_to_prepare = self._step_to_prepare, None
        if self._rebalance_due(step):
            self._state = self._open_rebalance(self._state, step)
        if isinstance(self._state, Voting):
            self._state = self._progress(self._state)
            self._start_vote(self._state, step + 1)
        self._next_step = self._next_due_step(step)
        self._recorder.after_launch(self._state, self._serving_state.layout)
        # Only now: a thread that wakes between two steps takes the interpreter's lock from the one
        # that is about to launch.
        self._workers.release()

    def run_boundary(self, step: int) -> Job[None]:
        """Runs the boundary as a job, after `after_launch`, for a caller that waits itself."""
        # Ranks agree on everything by step number: what was left out cannot be made up for here.
        if step > self._next_step:
            raise EngineError(f"boundary {self._next_step} was left out: now comes {step}")
        self._recorder.begin_boundary(step)
        summed = yield from self._load.advance(step)
        if summed:
            self._recorder.load_reduced(step - 1, self._load.latest, self._serving_state.layout)
        for sample in self._load.take_samples():
            self._recorder.batch_sampled(sample)
        # Always before the verdict: all ranks have to install shares and layers in the same order.
        yield from self._share_refresh.before_step(summed)
        if isinstance(self._state, Updating):
            self._state = self._report_if_finished(
                self._state.path.advance(self._state, step), step
            )
        elif isinstance(self._state, Voting):
            self._state = yield from self._settle_vote(self._state, step)
        if isinstance(self._state, Draining) and self._state.done:
            self._state = Idle()
        self._step_to_prepare, self._next_step = step, step + 1
        self._recorder.end_boundary(self._state, self._serving_state.layout)

    def close(self) -> None:
        """Ends the workers; each wait under way lasts at most until its own timeout.

        A second call does nothing; a boundary after the close raises.
        """
        if self._closed:
            return
        self._closed, self._step_to_prepare, self._next_step = True, None, BEFORE_ANY_STEP
        # A sum that was started takes all ranks: it has to be joined, or peers would wait for it.
        self._workers.load.release()
        try:
            run_blocking(self._load.drain(), self._config.timeout)
        finally:
            self._workers.close()
            self._recorder.close()

    def _next_due_step(self, step: int) -> int:
        """Returns the next boundary that has work."""
        if isinstance(self._state, Idle) and not self._share_refresh.pending:
            return self._load.next_due_step(step)
        return step + 1

    def _rebalance_due(self, step: int) -> bool:
        """Returns whether the load window that closed one step ago opens a rebalance here."""
        if self._path is None:
            return False
        offset = (step - 1) % self._config.step_interval
        return step > 1 and offset == self._config.step_offset and self._load.full

    def _open_rebalance(self, state: State, step: int) -> State:
        rebalance = RebalanceId(step // self._config.step_interval, step)
        match state:
            case Draining():
                return Failed(rebalance, "a rank still drains an aborted rebalance", state)
            case Idle():
                return self._start_planning(rebalance)
        # A rank of the in-place path ends its rebalance alone, when its own streams have read what
        # was written, and may open the next one here. The ballot tells it that this rank does not.
        self._recorder.rebalance_skipped(step)
        self._cast_failed(rebalance, step + 1, "a rank is still in the rebalance before")
        return state

    def _start_planning(self, rebalance: RebalanceId) -> Planning:
        assert self._path is not None, "nothing is due without a path"
        path, windows, layout = self._path, self._load.windows, self._serving_state.layout
        plan = immediate(lambda: path.propose(windows, layout))
        return Planning(
            rebalance, self._workers.planner.start(plan, "plan", rebalance=rebalance.number)
        )

    def _progress(self, state: Voting) -> Voting:
        """Returns the state after the progress of this rank's own work."""
        match state:
            case Planning(rebalance, plan) if plan.done():
                if (error := plan.exception()) is not None:
                    LOG.warning("rebalance %d: planner failed: %s", rebalance.number, error)
                    return Failed(rebalance, "planner failed", state)
                proposal = plan.result()
                self._warn_of_staging(rebalance, proposal)
                self._warn_of_missing_redundancy(rebalance, proposal)
                return Proposed(rebalance, proposal)
            case Transferring(progress) | Staged(progress, _):
                return progress.path.poll(progress)
        return state

    def _warn_of_staging(self, rebalance: RebalanceId, proposal: Proposal) -> None:
        """Warns once, on one rank, that staging limits the plans."""
        short = proposal.plan.short_of_staging
        if not short or self._warned_of_staging or self._members.rank_in_group:
            return
        self._warned_of_staging = True
        LOG.warning(
            "rebalance %d: each rank has %d staging buffers; with more, layers %s would be evener "
            "at once, and the rest waits for later rebalances. Staging for all slots of a layer "
            "moves all in one. Logged once; see the metric layers_short_of_staging",
            rebalance.number,
            self._serving_state.store.layout.staging,
            format_ranges(list(short)),
        )

    def _warn_of_missing_redundancy(self, rebalance: RebalanceId, proposal: Proposal) -> None:
        """Warns once, on one rank, that without redundant slots plans cannot reach the target."""
        if self._warned_of_missing_redundancy or self._members.rank_in_group:
            return
        left = imbalance_without_redundancy(proposal, self._config.planner.target)
        if left is None:
            return
        self._warned_of_missing_redundancy = True
        LOG.warning(
            "rebalance %d: an imbalance of %.2f is left, because every expert has one slot. "
            "Redundant slots (num_redundant_experts), one per rank say, would level it. "
            "Logged once",
            rebalance.number,
            left,
        )

    def _start_vote(self, state: Voting, due: int) -> None:
        """Starts the vote that is settled at boundary `due`."""
        spec = VoteSpec(
            ballots=self._vote_key(state.rebalance, due),
            outcome=self._vote_key(state.rebalance, outcome_key(state)),
            final_attempt=due - last_progress_step(state) > self._max_stalled_steps(state),
            ranks=self._members.ranks,
        )
        # Before the ballot is cast: a key that is not noted would stay in the store.
        self._collect_later(state.rebalance, due, outcome_key(state))
        job = vote(self._control, spec, ballot_of(state))
        self._vote = self._workers.vote.start(
            job, "vote", rebalance=state.rebalance.number, step=due
        )
        if self._keys is not None:
            self._keys.collect(state.rebalance.number, spec.ballots)

    def _max_stalled_steps(self, state: Voting) -> int:
        """Returns the number of steps that the rebalance may stay without progress."""
        planned = transfer_of(state) is not None
        return self._config.max_stalled_steps * (1 if planned else PLANNING_STALL_FACTOR)

    def _settle_vote(self, state: Voting, step: int) -> Job[State]:
        """Acts on the vote that is due at this boundary; returns the next state."""
        assert self._vote is not None
        try:
            verdict = yield JobDone(self._vote)
        except TimeoutError as error:
            # Not an abort: peers may have seen all ballots, and act on what those say.
            raise VoteOutcomeUnknown(
                f"rebalance {state.rebalance.number}: no verdict in time"
            ) from error
        match verdict, state:
            case Pending(), _:
                return state
            case StartTransfer(), Proposed(rebalance, proposal) if self._path is not None:
                self._share_refresh.apply_plan_shares(proposal.layout)
                return self._report_if_finished(self._path.start(rebalance, proposal, step), step)
            case Commit(chunks), Staged():
                next_state = state.progress.path.commit(state, chunks, step)
                return self._report_if_finished(next_state, step)
            case Abort(reason), _:
                return self._abort(state, step, reason)
        raise VoteOutcomeUnknown(
            f"the verdict {verdict} does not fit the state {type(state).__name__}"
        )

    def _report_if_finished(self, state: Transferring | Updating | Finished, step: int) -> State:
        """Ends the rebalance if everything is installed."""
        match state:
            case Finished(rebalance, layers, copies):
                self._add_report(rebalance, step, COMMITTED if layers else UNCHANGED, copies)
                return Idle()
        return state

    def _abort(self, state: Voting, step: int, reason: str) -> State:
        """Aborts the rebalance; layers that are not committed stay as they are, on every rank."""
        self.aborts[
            reason
            if reason in self.aborts or len(self.aborts) < MAX_ABORT_REASONS
            else OTHER_REASON
        ] += 1
        self._add_report(state.rebalance, step, reason, copies_committed(state))
        # A rank that saw all ballots may still wait, and votes again: this ballot tells it.
        self._cast_failed(state.rebalance, step + 1, reason)
        repairs = () if self._path is None else self._path.repair(reason)
        return Draining((*running_work(state), *repairs))

    def _cast_failed(self, rebalance: RebalanceId, due: int, reason: str) -> None:
        """Casts a failed ballot on a vote that other ranks may have started."""
        self._collect_later(rebalance, due, START_TRANSFER)
        ballot = Ballot(RankStatus.FAILED, reason=reason)
        job = vote_failed(self._control, self._vote_key(rebalance, due), ballot)
        self._workers.vote.start(job, "vote_failed", rebalance=rebalance.number, step=due)

    def _collect_later(self, rebalance: RebalanceId, due: int, outcome: str) -> None:
        """Notes the keys of the vote at `due` and the next one, for later deletion."""
        # A rank that leaves the rebalance at `due` may still cast on the vote after it.
        if self._keys is None:
            return
        votes = [self._vote_key(rebalance, due), self._vote_key(rebalance, due + 1)]
        self._keys.add(rebalance.number, votes, self._vote_key(rebalance, outcome))

    def _vote_key(self, rebalance: RebalanceId, subject: int | str) -> str:
        """Returns the key of the vote at a boundary, or of what votes settle."""
        return f"{self._members.scoped_name(self._config.name)}/{rebalance.number}/{subject}"

    def _add_report(self, rebalance: RebalanceId, step: int, outcome: str, copies: int) -> None:
        size = copies * self._serving_state.store.layout.slot_bytes
        report = RebalanceReport(rebalance.number, rebalance.opened_at, step, outcome, copies, size)
        self.reports.append(report)
        self._recorder.rebalance_ended(self._state, report)
