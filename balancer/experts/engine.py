"""The engine: rebalances while the model serves, in lockstep with every other rank.

`boundary(step)` is called before every step on every rank. Within an epoch each boundary first
settles the ballots that were cast at the boundary before, then casts this rank's next one. Expert
parallelism makes that free of waiting: a rank that has come through a step knows that every peer
has begun it, hence has cast its ballot. States: `balancer/experts/states.py`; protocol:
`docs/design/engine.md`.
"""

import logging
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from equipoise.balancer.experts.ballot import Abort, Ballot, Commit, Move, Stand, Wait, judge
from equipoise.balancer.experts.config import EngineConfig
from equipoise.balancer.experts.installed import Installed
from equipoise.balancer.experts.load import LoadWindow
from equipoise.balancer.experts.mover import Mover, Staged
from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.planner import Proposal, propose
from equipoise.balancer.experts.renewal import ShareRenewal
from equipoise.balancer.experts.states import (
    Agreeing,
    Barred,
    Committing,
    Draining,
    Epoch,
    InEpoch,
    Moving,
    Observing,
    Planning,
    Stage,
    State,
)
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import AgreementLost, BallotIncomplete, ControlLost

GO = b"go"
"""The answer to a stage's question that is not the reason of an abort."""
COMMITTED = "committed"
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochReport:
    """How an epoch ended, at the boundary before `step`.

    Attributes:
        number: of the epoch.
        opened: the boundary at which its load window was closed.
        step: the boundary at which it ended.
        outcome: `committed`, or the reason of the abort.
        slots: copies that the receiving ranks did not hold, over all ranks.
        bytes: their size.
    """

    number: int
    opened: int
    step: int
    outcome: str
    slots: int
    bytes: int


class ExpertEngine:
    """Epochs for one rank.

    Args:
        installed: what this rank holds.
        load: global loads.
        mover: fills staging.
        renewal: what becomes of shares between epochs.
        control: ballots and decisions.
        shape: how many of everything.
        config: cadence and bounds.
    """

    def __init__(
        self,
        installed: Installed,
        load: LoadWindow,
        mover: Mover,
        renewal: ShareRenewal,
        control: ControlPlane,
        shape: Shape,
        config: EngineConfig,
    ) -> None:
        self._installed = installed
        self._load = load
        self._mover = mover
        self._renewal = renewal
        self._control = control
        self._shape = shape
        self._config = config
        self._state: State = Observing()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="equipoise.engine")
        self.reports: list[EpochReport] = []
        self.aborts: Counter[str] = Counter()

    @property
    def state(self) -> State:
        """Where the engine is."""
        return self._state

    def boundary(self, step: int) -> None:
        """Between two steps: take loads, settle the last ballots, act, cast the next ones.

        Raises:
            AgreementLost: the outcome of a vote cannot be learnt; this rank must stop.
        """
        summed = self._load.advance(step)
        self._renewal.boundary(summed)
        if isinstance(self._state, InEpoch):
            self._state = self._settle(self._state, step)
        if isinstance(self._state, Draining) and self._state.work.done():
            self._state = Observing()
        if self._due(step):
            self._state = self._open(self._state, step)
        if isinstance(self._state, InEpoch):
            self._state = self._progress(self._state)
            self._cast(self._state, step + 1)

    def close(self) -> None:
        """End the worker; work in flight is waited for, which its own deadline bounds."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._renewal.close()
        self._load.drain()

    def _due(self, step: int) -> bool:
        """Whether the window that closed one step ago opens an epoch here."""
        on_time = step > 1 and (step - 1) % self._config.step_interval == 0
        return on_time and self._load.full and isinstance(self._state, Observing | Draining)

    def _open(self, state: State, step: int) -> InEpoch:
        epoch = Epoch(step // self._config.step_interval, step)
        if isinstance(state, Draining):
            reason = "a rank still drains an aborted epoch"
            return Barred(epoch, reason, Stage.MOVE, state.work)
        plan = self._worker.submit(
            propose,
            self._load.total,
            self._installed.layout,
            self._shape,
            self._config.hysteresis,
            self._installed.store.layout.staging,
        )
        return Planning(epoch, plan)

    def _progress(self, state: InEpoch) -> InEpoch:
        """What this rank's own work has become since the last boundary."""
        match state:
            case Planning(epoch, plan) if plan.done():
                error = plan.exception()
                if error is not None:
                    return self._bar(state, "planner failed", error)
                return Agreeing(epoch, plan.result())
            case Moving(epoch, proposal, staging) if staging.done():
                error = staging.exception()
                if error is not None:
                    return self._bar(state, "move failed", error)
                return Committing(epoch, proposal, staging.result())
        return state

    def _bar(self, state: Planning | Moving, reason: str, error: BaseException) -> Barred:
        LOG.warning("epoch %d: %s: %s", state.epoch.number, reason, error)
        work = state.plan if isinstance(state, Planning) else state.staging
        return Barred(state.epoch, reason, state.stage, work)

    def _cast(self, state: InEpoch, due: int) -> None:
        try:
            self._control.cast(self._question(state.epoch, due), _ballot(state).to_bytes())
        except ControlLost as error:
            raise AgreementLost(f"epoch {state.epoch.number}: {error}") from error

    def _settle(self, state: InEpoch, step: int) -> State:
        """Act on the ballots that were due at this boundary."""
        question = self._question(state.epoch, step)
        try:
            ballots = self._control.collect(question, self._config.vote_deadline)
        except BallotIncomplete as error:
            reason = f"no ballot from rank(s) {', '.join(map(str, error.missing))}"
            return self._decide(state, step, reason.encode())
        except ControlLost as error:
            raise AgreementLost(f"epoch {state.epoch.number}: {error}") from error
        return self._obey(state, step, [Ballot.from_bytes(text) for text in ballots])

    def _obey(self, state: InEpoch, step: int, ballots: list[Ballot]) -> State:
        verdict = judge(ballots)
        if isinstance(verdict, Wait) and step - state.epoch.opened > self._config.patience:
            verdict = Abort("out of patience")
        match verdict:
            case Wait():
                return state
            case Move() | Commit():
                return self._decide(state, step, GO)
            case Abort(reason):
                return self._decide(state, step, reason.encode())

    def _move(self, state: InEpoch) -> Moving:
        if not isinstance(state, Agreeing):
            raise AgreementLost(f"told to move in {type(state).__name__}")
        return Moving(state.epoch, state.proposal, self._stage(state.proposal))

    def _stage(self, proposal: Proposal) -> Future[Staged]:
        """Begin here, end on the worker; what fails here fails the epoch as it would there."""
        try:
            rest = self._mover.begin(proposal.moves, self._installed.settled)
        except Exception as error:
            failed: Future[Staged] = Future()
            failed.set_exception(error)
            return failed
        return self._worker.submit(rest)

    def _decide(self, state: InEpoch, step: int, wish: bytes) -> State:
        """Settle the stage for good, and do what was settled, whoever settled it.

        The first answer wins. So a rank that misses ballots may wish for an abort at any time: if
        a peer that saw them all moves or commits, this rank does so too. A stage has a question
        of its own because a rank that stayed out of a move would leave its peers' exchange
        unmatched, which fails their communicator.
        """
        key = f"{self._config.label}/{state.epoch.number}/{state.stage}"
        try:
            outcome = self._control.decide(key, wish)
        except ControlLost as error:
            raise AgreementLost(f"epoch {state.epoch.number}: {error}") from error
        if outcome != GO:
            return self._abort(state, step, outcome.decode())
        if state.stage is Stage.MOVE:
            return self._move(state)
        return self._commit(state, step)

    def _commit(self, state: InEpoch, step: int) -> State:
        if not isinstance(state, Committing):
            raise AgreementLost(f"told to commit in {type(state).__name__}")
        moves = state.proposal.moves
        self._installed.commit(self._renewal.adopt(state.proposal), state.staged.copies)
        self._report(state.epoch, step, COMMITTED, len(moves.travelling))
        return Observing()

    def _abort(self, state: InEpoch, step: int, reason: str) -> State:
        self.aborts[reason] += 1
        self._report(state.epoch, step, reason, 0)
        match state:
            case Planning(_, work) | Moving(_, _, work) | Barred(_, _, _, work):
                return Draining(work)
        return Observing()

    def _report(self, epoch: Epoch, step: int, outcome: str, slots: int) -> None:
        size = self._installed.store.layout.slot_bytes
        self.reports.append(
            EpochReport(epoch.number, epoch.opened, step, outcome, slots, slots * size)
        )

    def _question(self, epoch: Epoch, due: int) -> str:
        return f"{self._config.label}/{epoch.number}/{due}"


def _ballot(state: InEpoch) -> Ballot:
    match state:
        case Planning() | Moving():
            return Ballot(Stand.BUSY)
        case Agreeing(_, proposal):
            return Ballot(Stand.PLANNED, digest=proposal.layout.digest)
        case Committing(_, proposal, staged):
            return Ballot(Stand.STAGED, proposal.layout.digest, staged.sent, staged.received)
        case Barred(_, reason):
            return Ballot(Stand.FAILED, reason=reason)
