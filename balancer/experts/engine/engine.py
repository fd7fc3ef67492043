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
    MOVE,
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
    outcome_of,
    since,
    transfer_of,
    work_of,
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
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import AgreementLost, EngineError

KEPT = 1024
"""Reports of epochs that are kept."""
KINDS = 256
"""Reasons of aborts that are counted apart: some name ranks, and there are many sets of ranks."""
PLANNING = 16
"""A plan may take so many times `patience` steps: it takes seconds at most, whatever a step takes
(3.3 s for 60 layers of 384 experts on 320 ranks with `sigma`), and holds nobody up. Epochs due
meanwhile are skipped, and the plan is used. Were it given up sooner, it would still run when the
next epoch is due, which would be aborted for that, and so on for ever."""
OTHERS = "another reason"
"""What further ones are counted as."""
NEVER = -1
"""Less than any step: what comes behind the end is looked at."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """Who takes part, and since when.

    Attributes:
        control: ballots and decisions.
        members: the ranks.
        first: the step of the first boundary.
        keys: forgets what they ask each other; None where another member does.
    """

    control: ControlPlane
    members: EPGroup
    first: int
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
        group: Group,
        config: BalancerConfig,
        workers: Workers,
        recorder: EventRecorder,
    ) -> None:
        self._installed = installed
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
        self._next = group.first
        self._behind: int | None = None
        self._closed = False
        self._warned = False
        self.reports: deque[RebalanceReport] = deque(maxlen=KEPT)
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
        begun = self._state.proposal.changes[: len(self._state.writing)]
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
        if step < self._next:
            return
        if self._closed:
            raise EngineError(f"boundary {step} of an engine that was closed")
        self.after_launch()
        if step >= self._next:
            run_blocking(self.passage(step), self._config.timeout)

    def after_launch(self) -> None:
        """The forward behind the last boundary is on its way: prepare the next boundary.

        An epoch is opened, if one is due; this rank looks how far its own work has come, and votes;
        what works beside begins. Does nothing where the boundary had nothing to do.
        """
        if self._behind is None:
            return
        step, self._behind = self._behind, None
        if self._due(step):
            self._state = self._open(self._state, step)
        if isinstance(self._state, Voting):
            self._state = self._progress(self._state)
            self._cast(self._state, step + 1)
        self._next = self._when(step)
        self._recorder.prepared(self._state, self._installed.layout)
        self._workers.release()

    def passage(self, step: int) -> Job[None]:
        """The boundary as a job, after `after_launch`, for a caller that does the waiting."""
        if step > self._next:
            raise EngineError(f"boundary {self._next} was left out: now comes {step}")
        self._recorder.begin(step)
        summed = yield from self._load.advance(step)
        if summed:
            self._recorder.summed(step - 1, self._load.latest, self._installed.layout)
        yield from self._share_refresh.before_step(summed)
        if isinstance(self._state, Updating):
            self._state = self._landing(self._state.path.advance(self._state, step), step)
        elif isinstance(self._state, Voting):
            self._state = yield from self._settle(self._state, step)
        if isinstance(self._state, Draining) and self._state.done:
            self._state = Idle()
        self._behind, self._next = step, step + 1
        self._recorder.end(self._state, self._installed.layout)

    def close(self) -> None:
        """End what works beside; each wait under way lasts as long as its own deadline.

        Again is harmless; a boundary behind it is an error.
        """
        if self._closed:
            return
        self._closed, self._behind, self._next = True, None, NEVER
        self._workers.load.release()
        try:
            run_blocking(self._load.drain(), self._config.timeout)
        finally:
            self._workers.close()
            self._recorder.close()

    def _when(self, step: int) -> int:
        """The next boundary at which there is something to do."""
        if isinstance(self._state, Idle) and not self._share_refresh.pending:
            return self._load.due(step)
        return step + 1

    def _due(self, step: int) -> bool:
        """Whether the window that closed one step ago opens an epoch here."""
        if self._path is None:
            return False
        behind = (step - 1) % self._config.step_interval
        return step > 1 and behind == self._config.step_offset and self._load.full

    def _open(self, state: State, step: int) -> State:
        epoch = RebalanceId(step // self._config.step_interval, step)
        match state:
            case Draining():
                return Failed(epoch, "a rank still drains an aborted epoch", state)
            case Idle():
                return self._plan(epoch)
        # All ranks are here, unless one has left the epoch alone and opens the next: it is told.
        # Under locks each leaves alone, when its own streams have read what was written.
        self._recorder.skipped(step)
        self._decline(epoch, step + 1, "a rank is still in the epoch before")
        return state

    def _plan(self, epoch: RebalanceId) -> Planning:
        assert self._path is not None, "nothing is due without a path"
        path, windows, layout = self._path, self._load.windows, self._installed.layout
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
        short = proposal.draft.short_of_staging
        if not short or self._warned or self._members.rank_in_group:
            return
        self._warned = True
        LOG.warning(
            "epoch %d: each rank has %d staging buffers; with more, layers %s would come lower at "
            "once, and what is left waits for later epochs. A staging budget of a layer's slots "
            "moves all in one. Said once; the metric layers_short_of_staging keeps count",
            epoch.number,
            self._installed.store.layout.staging,
            format_ranges(list(short)),
        )

    def _cast(self, state: Voting, due: int) -> None:
        """Begin the vote that is settled at boundary `due`."""
        question = VoteSpec(
            ballots=self._question(state.epoch, due),
            outcome=self._question(state.epoch, outcome_of(state)),
            final_attempt=due - since(state) > self._patience(state),
            ranks=self._members.ranks,
        )
        self._file(state.epoch, due, outcome_of(state))
        job = vote(self._control, question, ballot_of(state))
        self._vote = self._workers.vote.start(job, "vote", epoch=state.epoch.number, step=due)
        if self._keys is not None:
            self._keys.collect(state.epoch.number, question.ballots)

    def _patience(self, state: Voting) -> int:
        """Steps that the epoch may stay where it is."""
        planned = transfer_of(state) is not None
        return self._config.max_stalled_steps * (1 if planned else PLANNING)

    def _settle(self, state: Voting, step: int) -> Job[State]:
        """Act on the vote that is due at this boundary."""
        assert self._vote is not None
        try:
            verdict = yield JobDone(self._vote)
        except TimeoutError as error:
            raise AgreementLost(f"epoch {state.epoch.number}: no verdict in time") from error
        match verdict, state:
            case Pending(), _:
                return state
            case StartTransfer(), Proposed(epoch, proposal) if self._path is not None:
                self._share_refresh.planned(proposal.layout)
                return self._landing(self._path.start(epoch, proposal, step), step)
            case Commit(lots), Staged():
                return self._landing(state.voyage.path.commit(state, lots, step), step)
            case Abort(reason), _:
                return self._abort(state, step, reason)
        raise AgreementLost(f"told to {verdict} in {type(state).__name__}")

    def _landing(self, state: Transferring | Updating | Finished, step: int) -> State:
        """End the epoch where everything is installed."""
        match state:
            case Finished(epoch, layers, copies):
                self._report(epoch, step, COMMITTED if layers else UNCHANGED, copies)
                return Idle()
        return state

    def _abort(self, state: Voting, step: int, reason: str) -> State:
        """Leave the epoch; what it has not committed stays as installed, on every rank."""
        self.aborts[reason if reason in self.aborts or len(self.aborts) < KINDS else OTHERS] += 1
        self._report(state.epoch, step, reason, copies_of(state))
        # Whoever judged to wait where this rank missed a ballot asks again, and is told.
        self._decline(state.epoch, step + 1, reason)
        repairs = () if self._path is None else self._path.repair(reason)
        return Draining((*work_of(state), *repairs))

    def _decline(self, epoch: RebalanceId, due: int, reason: str) -> None:
        """Say, on a vote that others may have begun, that this rank takes no part."""
        self._file(epoch, due, MOVE)
        ballot = Ballot(RankStatus.FAILED, reason=reason)
        job = vote_failed(self._control, self._question(epoch, due), ballot)
        self._workers.vote.start(job, "vote_failed", epoch=epoch.number, step=due)

    def _file(self, epoch: RebalanceId, due: int, outcome: str) -> None:
        """Who leaves the epoch at `due` may cast once more, on the vote behind it."""
        if self._keys is None:
            return
        votes = [self._question(epoch, due), self._question(epoch, due + 1)]
        self._keys.add(epoch.number, votes, self._question(epoch, outcome))

    def _question(self, epoch: RebalanceId, what: int | str) -> str:
        """The vote that is due at a boundary, or what votes may settle."""
        return f"{self._members.scoped_name(self._config.name)}/{epoch.number}/{what}"

    def _report(self, epoch: RebalanceId, step: int, outcome: str, copies: int) -> None:
        size = copies * self._installed.store.layout.slot_bytes
        report = RebalanceReport(epoch.number, epoch.opened, step, outcome, copies, size)
        self.reports.append(report)
        self._recorder.ended(self._state, report)
