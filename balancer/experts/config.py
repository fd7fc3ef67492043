"""Configuration of the balancer: options of a plan, of an engine and of routing.

Imports nothing heavy, so that a command line can read it.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from equipoise.hal.arguments import (
    check_type,
    positive_seconds,
    real_number,
    whole_number,
)
from equipoise.hal.errors import ConfigError, PlacementError
from equipoise.hal.shares import SHARE_ONE


class RoutingRule(StrEnum):
    """How a token finds one of its expert's replicas."""

    SHARES = "shares"
    """By the shares, as the share mode has them."""
    VLLM_ROW_HASH = "vllm"
    """As vLLM does: by the hash of the row, evenly."""
    TRTLLM_ROUND_ROBIN = "tensorrt_llm"
    """As TensorRT-LLM does: by turns within a block, evenly."""


Choice = TypeVar("Choice", bound=StrEnum)

MIN_SIGMA_WINDOWS = 8
"""Windows from which on they say well enough how load varies: a deviation of seven numbers is known
to a third of itself at best."""
DEFAULT_SIGMA = 1.0
"""Standard deviations that a rank counts with by default where there are so many windows: a plan
for their sum alone levels the sum, and no batch."""


class PlanningPolicy(StrEnum):
    """How to plan."""

    GREEDY = "greedy"
    """Anew, by the rule that DeepSeek's EPLB and TensorRT-LLM publish."""
    CONNECTED = "connected"
    """Anew, so that the copies connect all ranks and shares can level any batch."""
    INCREMENTAL = "incremental"
    """From what is installed, moving as little as the target allows."""


class Objective(StrEnum):
    """What is to be equal on all ranks."""

    TOKENS = "tokens"
    """Rows: what compute-bound phases wait for."""
    ACTIVE_EXPERTS = "active_experts"
    """Experts that have any rows: what memory-bound decoding waits for.

    Source: METRO, arXiv 2512.09277.
    """


class Split(StrEnum):
    """How rows are divided among the copies of an expert."""

    BY_SHARES = "shares"
    """By shares that level the ranks."""
    EVEN = "even"
    """All copies alike: for engines that know no shares."""


def default_sigma(windows: int, policy: str, objective: str) -> float:
    """Standard deviations that a plan counts with where nobody says how many.

    Args:
        windows: of load that the plan is made from.
        policy: a `PlanningPolicy`; greedy has no use for deviations.
        objective: an `Objective`; where active experts are planned for, windows are batches, each
            with 0 or 1 for an expert: deviations of these are mostly chance, and following them
            moves a fifth of the slots and more in each steady window (docs/design/planning.md).
    """
    uses_deviations = policy != PlanningPolicy.GREEDY and objective == Objective.TOKENS
    return DEFAULT_SIGMA if uses_deviations and windows >= MIN_SIGMA_WINDOWS else 0.0


def parse_choice(kind: type[Choice], name: str, value: str) -> Choice:
    """The choice of that value; `name` is what it is for. Raises `PlacementError`."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(kind)
        raise PlacementError(f"{name} must be one of {choices}, got {value!r}") from None


class ShareMode(StrEnum):
    """How the tokens of an expert are divided among its replicas."""

    STATIC = "static"
    """As planned with the placement."""
    LAGGED = "lagged"
    """Solved again from the last summed sub-window, off the step path."""
    LOCAL = "local"
    """Each rank levels its own batch: no collective."""
    NODE = "node"
    """The ranks of a node level their batches together: one all-gather per layer and step among
    them."""
    EXACT = "exact"
    """All ranks level their batches together: one all-gather per layer and step."""


class Locality(StrEnum):
    """Which of a row's possible replicas is preferred, where the shares leave a choice."""

    ANY = "any"
    """None: every rank divides its rows alike."""
    PREFER = "prefer"
    """Those on the row's own rank, up to what they take; with exact shares."""


class CommitMode(StrEnum):
    """How new weights get into slots."""

    STAGED = "staged"
    """From peers to staging during the forward pass, then into slots between two steps."""
    IN_PLACE = "in_place"
    """From host memory into slots, a few layers per step, each under a stream lock."""


PLANNER_LIMITS = {"target": 1000, "slack": 1, "survive": 2, "sigma": 100, "headroom": 1000}
"""Upper limit of each option; the lower limit is 0."""
AT_LEAST_ONE = (
    "slots_per_message",
    "layer_updates_per_iter",
    "max_stalled_steps",
    "nodes",
    "ranks_sharing_rows",
    "log_balancedness_interval",
)
"""Fields that are at least 1."""
INTEGER_FIELDS = (
    "window_size",
    "step_interval",
    "sub_window",
    "step_offset",
    *AT_LEAST_ONE,
)
"""Fields that are integers."""


ENUM_FIELDS: dict[str, type[StrEnum]] = {
    "shares": ShareMode,
    "locality": Locality,
    "routing_rule": RoutingRule,
}
"""Fields that are members of an enum."""


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """Options of the planner; `equipoise.balancer.experts.plan` describes each.

    Attributes:
        target: imbalance (max/mean - 1), mean over layers, at which planning stops.
        slack: room for shares on each rank, as a fraction of the mean.
        survive: loss to survive: 0 none, 1 of a rank, 2 of a node.
        sigma: standard deviations over the windows that are added to the load of a rank.
        headroom: with shares that level each batch, swaps of experts in each changed layer that
            leave them room.

    Raises `ConfigError` for values out of range: the planner would fail in every rebalance.
    """

    target: float = 0.02
    slack: float = 0.1
    survive: int = 0
    sigma: float = 0.0
    headroom: int = 8

    def __post_init__(self) -> None:
        for name, most in PLANNER_LIMITS.items():
            # Written this way, nan is refused too.
            if not 0 <= real_number(name, getattr(self, name), ConfigError) <= most:
                raise ConfigError(f"{name} must be 0 to {most}, got {getattr(self, name):g}")
        whole_number("survive", self.survive, ConfigError)
        whole_number("headroom", self.headroom, ConfigError)


def default_sub_window(window: int, interval: int) -> int:
    """Steps that divide the interval, as near to a quarter of the window as can be; the window is
    then rounded down to a multiple."""
    quarter = max(window / 4, 1.0)
    small = [steps for steps in range(1, math.isqrt(interval) + 1) if interval % steps == 0]
    fitting = [steps for low in small for steps in (low, interval // low) if steps <= window]
    return min(sorted(fitting), key=lambda steps: abs(math.log(steps / quarter)))


@dataclass(frozen=True, kw_only=True)
class BalancerConfig:
    """Configuration of an engine: intervals, bounds and modes.

    The defaults of window and interval are short, because a plan that nothing needs moves nothing:
    engines that plan anew every time take 1,000 steps and more (docs/design/replay.md).

    Attributes:
        name: distinguishes the votes of several engines on one control plane;
            `equipoise.open_balancer` takes the model's where it is empty.
        shares: the share mode. None is `static` with another engine's routing rule; else the
            balancer takes `local`, or `lagged` where the device levels a batch only through the
            host.
        window_size: steps of load that a plan uses.
        step_interval: steps between the boundaries at which rebalances open.
        sub_window: steps that are summed at a time; divides both. 0 becomes what is nearest to a
            quarter of the window.
        step_offset: steps by which these boundaries are later, so that several engines do not move
            weights at once; below `step_interval`, and a multiple of `sub_window`.
        locality: whether rows stay on their rank as far as exact shares allow.
        routing_rule: the rule that picks a replica; those of other engines divide evenly.
        planner: options of the planner.
        min_gain: imbalance (max/mean - 1) that a layer has to gain to be changed.
        max_stalled_steps: steps without progress after which a rebalance is aborted; a plan may
            take 16 times as many.
        slots_per_message: maximum number of slots in a message.
        layer_updates_per_iter: layers that are rewritten per step on the in-place path.
        nodes: number of nodes, with equally many neighbouring ranks: weights come from the same
            node if one of its ranks has them.
        ranks_sharing_rows: number of neighbouring ranks that route the same rows, as those of a
            tensor-parallel group do: they pick the same replicas. 1 if each rank has its own rows.
        log_balancedness: whether the event sink logs the balancedness at intervals.
        log_balancedness_interval: steps between two such lines.
        timeout: seconds that any wait may last.

    Raises `ConfigError` for invalid values.
    """

    name: str = ""
    shares: ShareMode | None = None
    window_size: int = 128
    step_interval: int = 256
    sub_window: int = 0
    step_offset: int = 0
    locality: Locality = Locality.ANY
    routing_rule: RoutingRule = RoutingRule.SHARES
    planner: PlannerOptions = PlannerOptions()
    min_gain: float = 0.01
    max_stalled_steps: int = 64
    slots_per_message: int = 16
    layer_updates_per_iter: int = 2
    nodes: int = 1
    ranks_sharing_rows: int = 1
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    timeout: float = 20.0

    @property
    def min_gain_parts(self) -> int:
        """`min_gain` in parts per 65536, the unit of planned imbalances."""
        return int(self.min_gain * SHARE_ONE)

    @property
    def levels_batches(self) -> bool:
        """Whether the shares level each batch in the step."""
        return self.shares in (ShareMode.LOCAL, ShareMode.NODE, ShareMode.EXACT)

    @property
    def vote_timeout(self) -> float:
        """Seconds to wait for ballots: less than what a peer's collective waits for this rank."""
        return self.timeout / 4

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.sub_window < 0 or self.window_size < 1 or self.step_interval < 1:
            raise ConfigError(
                f"window_size {self.window_size} and step_interval {self.step_interval} are at "
                f"least one step, and sub_window {self.sub_window} at least 0"
            )
        if not self.sub_window:
            sums = default_sub_window(
                self.window_size, math.gcd(self.window_size, self.step_interval)
            )
            object.__setattr__(self, "sub_window", sums)
        if self.window_size % self.sub_window or self.step_interval % self.sub_window:
            raise ConfigError(
                f"window_size {self.window_size} and step_interval {self.step_interval} "
                f"must be multiples of sub_window {self.sub_window}"
            )
        if self.step_offset % self.sub_window or not 0 <= self.step_offset < self.step_interval:
            # A plan needs the sum of the last sub-window, so rebalances open one step after one.
            raise ConfigError(
                f"step_offset {self.step_offset} must be a multiple of sub_window "
                f"{self.sub_window}, and less than step_interval {self.step_interval}"
            )
        if self.routing_rule is not RoutingRule.SHARES and self.shares is None:
            object.__setattr__(self, "shares", ShareMode.STATIC)
        if self.routing_rule is not RoutingRule.SHARES and self.shares is not ShareMode.STATIC:
            raise ConfigError(
                f"routing_rule {self.routing_rule} reads no shares: they must be static, "
                f"not {self.shares}"
            )
        if self.locality is Locality.PREFER and self.shares is not ShareMode.EXACT:
            raise ConfigError(
                f"locality {self.locality} divides a batch's own counts: shares must be exact, "
                f"not {self.shares or 'left open'}"
            )
        if self.locality is Locality.PREFER and self.ranks_sharing_rows > 1:
            raise ConfigError(
                f"locality {self.locality} has every rank pick replicas of its own, but "
                f"{self.ranks_sharing_rows} of them route the same rows"
            )
        if self.step_interval < self.window_size:
            raise ConfigError(
                f"step_interval {self.step_interval} is shorter than window_size {self.window_size}"
            )
        self._check_counts()

    def _check_kinds(self) -> None:
        """Words become choices, and what is counted has to be whole."""
        for name, kind in ENUM_FIELDS.items():
            if name == "shares" and self.shares is None:
                continue
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                choices, value = ", ".join(kind), getattr(self, name)
                raise ConfigError(f"{name} must be one of {choices}, got {value!r}") from None
        for name in INTEGER_FIELDS:
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"{name} is a whole number, got {getattr(self, name)!r}")
        check_type("name", self.name, str, ConfigError)
        check_type("planner", self.planner, PlannerOptions, ConfigError)
        check_type("log_balancedness", self.log_balancedness, bool, ConfigError)
        positive_seconds("timeout", self.timeout, ConfigError)

    def _check_counts(self) -> None:
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1, got {getattr(self, name)}")
        # nan is refused too
        if not 0 <= real_number("min_gain", self.min_gain, ConfigError) < math.inf:
            raise ConfigError(f"min_gain is at least 0, got {self.min_gain}")
