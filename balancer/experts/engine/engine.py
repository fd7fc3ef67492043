"""The engine: rebalances while the model serves, in lockstep with every other rank.

`before_step(step)` is called before every step on every rank, and `after_launch()` when the step's
forward is on its way. Within a rebalance each boundary settles the vote that was begun after the
boundary before; the next one is begun after the launch. Expert parallelism makes that free of
waiting: a rank that has come through a step knows that every peer has begun it, hence has begun its
vote. States: `balancer/experts/engine/states.py`; protocol: `docs/design/engine.md`.
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
    copies_of,
    last_progress_step,
    outcome_of,
    running_work,
    transfer_of,
)
from equipoise.balancer.experts.load_window import LoadWindow
from equipoise.balancer.experts.placement import Layout, Load
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
from equipoise.balancer.experts.weights.expert_weights import format_ranges
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import EngineError, VoteOutcomeUnknown

MAX_REPORTS = 1024
"""Reports of epochs that are kept."""
MAX_ABORT_REASONS = 256
"""Reasons of aborts that are counted apart: some name ranks, and there are many sets of ranks."""
PLANNING_STALL_FACTOR = 16
"""A plan may take so many times `patience` steps: it takes seconds at most, whatever a step takes
(3.3 s for 60 layers of 384 experts on 320 ranks with `sigma`), and holds nobody up. Epochs due
meanwhile are skipped, and the plan is used. Were it given up sooner, it would still run when the
next epoch is due, which would be aborted for that, and so on for ever."""
OTHERS = "another reason"
"""What further ones are counted as."""
BEFORE_ANY_STEP = -1
"""Less than any step: what comes behind the end is looked at."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineContext:
    """Who takes part, and since when.

    Attributes:
        control: ballots and decisions.
        members: the ranks.
        first_step: the step of the first boundary.
        keys: forgets what they ask each other; None where another member does.
    """

    control: ControlPlane
    members: EPGroup
    first_step: int
    keys: KeyCollector | None


class UpdatePath(Protocol):
    """How an epoch comes into slots: by the boundary, or under a lock.

    The state that `start` returns says what the path is asked from then on.
    """

    def propose(self, windows: Load, layout: Layout) -> Proposal:
        """Plan for the load of these windows, on a worker."""
        ...

    def start(
        self, epoch: RebalanceId, proposal: Proposal, step: int
    ) -> Transferring | Updating | Finished:
        """Every rank has the same proposal, at the boundary before `step`."""
        ...

    def repair(self, reason: str) -> tuple[JobHandle[None], ...]:
        """Begin to mend what broke an epoch that all ranks abort for `reason`."""
        ...


class RebalanceEngine:
    """Epochs for one rank.

    Args:
        installed: what this rank holds.
        load: global loads.
        path: how what was agreed on comes into slots; None to rebalance never.
        share_refresh: what becomes of shares between epochs.
        group: who takes part, and since when.
        config: cadence and bounds.
        workers: work beside the forward.
        recorder: told what happens at boundaries that have something to do.
    """

    def __init__(
        self,
        installed: ServingState,
        load: LoadWindow,
        path: UpdatePath | None,
        share_refresh: ShareRefresh,
        group: EngineContext,
        config: BalancerConfig,
        workers: Workers,
        recorder: EventRecorder,
    ) -> None:
        self._serving_state = installed
        self._load = load
        self._path = path
        self._share_refresh = share_refresh
        self._control = group.control
        self._members = group.members
        self._keys = group.keys
        self._config = config
        self._workers = workers
        self._recorder = recorder
        self._state: State = Idle()
        self._vote: JobHandle[Verdict] | None = None
        self._next_step = group.first_step
        self._step_to_prepare: int | None = None
        self._closed = False
        self._warned_of_staging = False
        self.reports: deque[RebalanceReport] = deque(maxlen=MAX_REPORTS)
        self.aborts: Counter[str] = Counter()

    @property
    def state(self) -> State:
        """Where the engine is."""
        return self._state

    @property
    def half_written_layers(self) -> tuple[int, ...]:
        """Layers whose slots may hold old weights, new ones, or a part of each.

        Only while they are rewritten in place, and only of use to whoever leaves that half done.
        """
        if not isinstance(self._state, Updating):
            return ()
        begun = self._state.proposal.layer_updates[: len(self._state.writes)]
        return tuple(layer for change in begun for layer in change.layers)

    @property
    def uncollected(self) -> tuple[StoredKey, ...]:
        """What was asked and is not forgotten, for who comes after; once the engine is closed."""
        return () if self._keys is None else self._keys.uncollected

    def before_step(self, step: int) -> None:
        """Between two steps, before `step`: settle what is due, and act on it.

        Most boundaries have nothing to do, and cost a comparison. What the forward need not wait
        for is done in `after_launch`, at the next boundary at the latest. One thread calls both.

        Raises:
            AgreementLost: the outcome of a vote cannot be learnt; this rank must stop.
            EngineError: a boundary was left out, or the engine was closed.
        """
        if step < self._next_step:
            return
        if self._closed:
            raise EngineError(f"boundary {step} of an engine that was closed")
        self.after_launch()
        if step >= self._next_step:
            run_blocking(self.run_boundary(step), self._config.timeout)

    def after_launch(self) -> None:
        """The forward behind the last boundary is on its way: prepare the next boundary.

        An epoch is opened, if one is due; this rank looks how far its own work has come, and votes;
        what works beside begins. Does nothing where the boundary had nothing to do.
        """
        if self._step_to_prepare is None:
            return
        step, self._step_to_prepare = self._step_to_prepare, None
        if self._rebalance_due(step):
            self._state = self._open_rebalance(self._state, step)
        if isinstance(self._state, Voting):
            self._state = self._progress(self._state)
            self._start_vote(self._state, step + 1)
        self._next_step = self._next_due_step(step)
        self._recorder.after_launch(self._state, self._serving_state.layout)
        self._workers.release()

    def run_boundary(self, step: int) -> Job[None]:
        """The boundary as a job, after `after_launch`, for a caller that does the waiting."""
        if step > self._next_step:
            raise EngineError(f"boundary {self._next_step} was left out: now comes {step}")
        self._recorder.begin_boundary(step)
        summed = yield from self._load.advance(step)
        if summed:
            self._recorder.load_reduced(step - 1, self._load.latest, self._serving_state.layout)
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
        """End what works beside; each wait under way lasts as long as its own deadline.

        Again is harmless; a boundary behind it is an error.
        """
        if self._closed:
            return
        self._closed, self._step_to_prepare, self._next_step = True, None, BEFORE_ANY_STEP
        self._workers.load.release()
        try:
            run_blocking(self._load.drain(), self._config.timeout)
        finally:
            self._workers.close()
            self._recorder.close()

    def _next_due_step(self, step: int) -> int:
        """The next boundary at which there is something to do."""
        if isinstance(self._state, Idle) and not self._share_refresh.pending:
            return self._load.next_due_step(step)
        return step + 1

    def _rebalance_due(self, step: int) -> bool:
        """Whether the window that closed one step ago opens an epoch here."""
        if self._path is None:
            return False
        behind = (step - 1) % self._config.step_interval
        return step > 1 and behind == self._config.step_offset and self._load.full

    def _open_rebalance(self, state: State, step: int) -> State:
        epoch = RebalanceId(step // self._config.step_interval, step)
        match state:
            case Draining():
                return Failed(epoch, "a rank still drains an aborted epoch", state)
            case Idle():
                return self._start_planning(epoch)
        # All ranks are here, unless one has left the epoch alone and opens the next: it is told.
        # Under locks each leaves alone, when its own streams have read what was written.
        self._recorder.rebalance_skipped(step)
        self._cast_failed(epoch, step + 1, "a rank is still in the epoch before")
        return state

    def _start_planning(self, epoch: RebalanceId) -> Planning:
        assert self._path is not None, "nothing is due without a path"
        path, windows, layout = self._path, self._load.windows, self._serving_state.layout
        plan = immediate(lambda: path.propose(windows, layout))
        return Planning(epoch, self._workers.planner.start(plan, "plan", epoch=epoch.number))

    def _progress(self, state: Voting) -> Voting:
        """What this rank's own work has become since the last boundary."""
        match state:
            case Planning(epoch, plan) if plan.done():
                if (error := plan.exception()) is not None:
                    LOG.warning("epoch %d: planner failed: %s", epoch.number, error)
                    return Failed(epoch, "planner failed", state)
                proposal = plan.result()
                self._warn_of_staging(epoch, proposal)
                return Proposed(epoch, proposal)
            case Transferring(voyage) | Staged(voyage, _):
                return voyage.path.poll(voyage)
        return state

    def _warn_of_staging(self, epoch: RebalanceId, proposal: Proposal) -> None:
        """Say once, on one rank, that staging is what bounds the plans."""
        short = proposal.plan.short_of_staging
        if not short or self._warned_of_staging or self._members.rank_in_group:
            return
        self._warned_of_staging = True
        LOG.warning(
            "epoch %d: each rank has %d staging buffers; with more, layers %s would come lower at "
            "once, and what is left waits for later epochs. A staging budget of a layer's slots "
            "moves all in one. Said once; the metric layers_short_of_staging keeps count",
            epoch.number,
            self._serving_state.store.layout.staging,
            format_ranges(list(short)),
        )

    def _start_vote(self, state: Voting, due: int) -> None:
        """Begin the vote that is settled at boundary `due`."""
        question = VoteSpec(
            ballots=self._vote_key(state.rebalance, due),
            outcome=self._vote_key(state.rebalance, outcome_of(state)),
            final_attempt=due - last_progress_step(state) > self._max_stalled_steps(state),
            ranks=self._members.ranks,
        )
        self._collect_later(state.rebalance, due, outcome_of(state))
        job = vote(self._control, question, ballot_of(state))
        self._vote = self._workers.vote.start(job, "vote", epoch=state.rebalance.number, step=due)
        if self._keys is not None:
            self._keys.collect(state.rebalance.number, question.ballots)

    def _max_stalled_steps(self, state: Voting) -> int:
        """Steps that the epoch may stay where it is."""
        planned = transfer_of(state) is not None
        return self._config.max_stalled_steps * (1 if planned else PLANNING_STALL_FACTOR)

    def _settle_vote(self, state: Voting, step: int) -> Job[State]:
        """Act on the vote that is due at this boundary."""
        assert self._vote is not None
        try:
            verdict = yield JobDone(self._vote)
        except TimeoutError as error:
            raise VoteOutcomeUnknown(
                f"epoch {state.rebalance.number}: no verdict in time"
            ) from error
        match verdict, state:
            case Pending(), _:
                return state
            case StartTransfer(), Proposed(epoch, proposal) if self._path is not None:
                self._share_refresh.apply_plan_shares(proposal.layout)
                return self._report_if_finished(self._path.start(epoch, proposal, step), step)
            case Commit(lots), Staged():
                return self._report_if_finished(state.progress.path.commit(state, lots, step), step)
            case Abort(reason), _:
                return self._abort(state, step, reason)
        raise VoteOutcomeUnknown(f"told to {verdict} in {type(state).__name__}")

    def _report_if_finished(self, state: Transferring | Updating | Finished, step: int) -> State:
        """End the epoch where everything is installed."""
        match state:
            case Finished(epoch, layers, copies):
                self._add_report(epoch, step, COMMITTED if layers else UNCHANGED, copies)
                return Idle()
        return state

    def _abort(self, state: Voting, step: int, reason: str) -> State:
        """Leave the epoch; what it has not committed stays as installed, on every rank."""
        self.aborts[
            reason if reason in self.aborts or len(self.aborts) < MAX_ABORT_REASONS else OTHERS
        ] += 1
        self._add_report(state.rebalance, step, reason, copies_of(state))
        # Whoever judged to wait where this rank missed a ballot asks again, and is told.
        self._cast_failed(state.rebalance, step + 1, reason)
        repairs = () if self._path is None else self._path.repair(reason)
        return Draining((*running_work(state), *repairs))

    def _cast_failed(self, epoch: RebalanceId, due: int, reason: str) -> None:
        """Say, on a vote that others may have begun, that this rank takes no part."""
        self._collect_later(epoch, due, START_TRANSFER)
        ballot = Ballot(RankStatus.FAILED, reason=reason)
        job = vote_failed(self._control, self._vote_key(epoch, due), ballot)
        self._workers.vote.start(job, "vote_failed", epoch=epoch.number, step=due)

    def _collect_later(self, epoch: RebalanceId, due: int, outcome: str) -> None:
        """Who leaves the epoch at `due` may cast once more, on the vote behind it."""
        if self._keys is None:
            return
        votes = [self._vote_key(epoch, due), self._vote_key(epoch, due + 1)]
        self._keys.add(epoch.number, votes, self._vote_key(epoch, outcome))

    def _vote_key(self, epoch: RebalanceId, what: int | str) -> str:
        """The vote that is due at a boundary, or what votes may settle."""
        return f"{self._members.scoped_name(self._config.name)}/{epoch.number}/{what}"

    def _add_report(self, epoch: RebalanceId, step: int, outcome: str, copies: int) -> None:
        size = copies * self._serving_state.store.layout.slot_bytes
        report = RebalanceReport(epoch.number, epoch.opened_at, step, outcome, copies, size)
        self.reports.append(report)
        self._recorder.rebalance_ended(self._state, report)
