"""What one exploration plays: sizes, a schedule, lanes that lag, and faults."""

from dataclasses import dataclass
from enum import StrEnum

from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.placement import ExpertShape


class FaultKind(StrEnum):
    """What goes wrong on one rank."""

    STOPPED = "stopped"
    """Nothing of the rank moves any more."""
    KILLED = "killed"
    """The rank is gone, and the launcher says so."""
    PLANNER_RAISES = "planner raises"
    TRANSFER_RAISES = "transfer raises"
    SOLVER_RAISES = "solver raises"
    VOTE_RAISES = "vote raises"
    BALLOT_LOST = "ballot lost"
    """The next ballot never reaches the store."""
    HASTY_VOTE = "hasty vote"
    """The next ballots that are not all there are waited for no longer."""
    OTHER_PLAN = "other plan"
    OTHER_TABLES = "other tables"
    BLOB_FLIPPED = "blob flipped"
    """A bit of the next slots that are packed."""
    STAGING_FLIPPED = "staging flipped"
    """A bit of the next slots that are unpacked."""
    MESSAGE_LOST = "message lost"
    """The next blob never arrives."""
    EXCHANGE_EXPIRES = "exchange expires"
    """What the transfer has under way passes its deadline."""
    STORE_CUT = "store cut"
    """The rank reaches the store no more."""
    STORE_LOST = "store lost"
    """Nobody does."""
    WRITE_FLIPPED = "write flipped"
    """A bit of the next slots that are written in place."""
    WRITE_FAILS = "write fails"
    """The next slots cannot be written in place."""
    SLOW = "slow"
    """The rank gets a hundredth of the choices."""


@dataclass(frozen=True)
class Fault:
    """A fault on `rank`, `delay` micro-steps after its host has come to boundary `step`."""

    kind: FaultKind
    rank: int
    step: int
    delay: int


@dataclass(frozen=True)
class Lag:
    """A lane that moves only when nothing else can, while its host is in these steps."""

    kind: str
    rank: int
    first: int
    last: int


class Path(StrEnum):
    """How weights come into slots."""

    STAGED = "staged"
    """From peers to staging, and from there between two steps."""
    BY_STREAM = "in place, by stream"
    """From the host's memory by the copy stream, under locks."""
    BY_HOST = "in place, by host"
    """The same by the host itself, half a slot at a time."""


@dataclass(frozen=True)
class Cadence:
    """Steps summed at a time, in a window, and between the boundaries that open rebalances."""

    sub_window: int
    window: int
    interval: int


@dataclass(frozen=True)
class Case:
    """One world.

    Attributes:
        shape: how many of everything.
        staging: buffers of a rank.
        slots_per_message: slots that a blob may carry; layers that are rewritten a step.
        path: how weights come into slots.
        world: name of the backend that the ranks live on.
        shares: the share mode.
        cadence: of loads and rebalances.
        max_stalled_steps: boundaries without progress that a rebalance may last.
        readers: ranks on which a second stream reads.
        ahead: steps that a host may be ahead of its device.
        steps: that are served on the schedule; behind them come eager ones.
        script: what the scripted planner's layouts are drawn from; 0 is the planner that ships.
        hot: the expert that most rows of a phase go to.
        schedule: who moves next, over and over; empty is eager.
        lags: lanes that are late.
        faults: what goes wrong.
    """

    shape: ExpertShape
    staging: int
    slots_per_message: int
    path: Path = Path.STAGED
    world: str = "independent"
    shares: ShareMode = ShareMode.STATIC
    cadence: Cadence = Cadence(1, 1, 2)
    max_stalled_steps: int = 64
    readers: tuple[int, ...] = ()
    ahead: int = 0
    steps: int = 6
    script: int = 1
    hot: tuple[int, ...] = (0, 1)
    schedule: bytes = b""
    lags: tuple[Lag, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def config(self) -> BalancerConfig:
        """Of the engine on every rank."""
        return BalancerConfig(
            name="explored",
            shares=self.shares,
            window_size=self.cadence.window,
            step_interval=self.cadence.interval,
            sub_window=self.cadence.sub_window,
            min_gain=0,
            max_stalled_steps=self.max_stalled_steps,
            slots_per_message=self.slots_per_message,
            layer_updates_per_iter=self.slots_per_message,
        )

    @property
    def in_place(self) -> bool:
        """Whether slots are rewritten in place."""
        return self.path is not Path.STAGED

    @property
    def tail(self) -> int:
        """Eager steps at the end, in which a healthy rebalance that is open comes to its end."""
        return 3 + 2 * self.shape.layers
