"""The state of a live display, built from the messages of a run one by one."""

from collections.abc import Callable
from dataclasses import dataclass, field

from equipoise.balancer.experts.runtime.events import COMMITTED, COMPLETED
from equipoise.demo.live_feed import HOST
from equipoise.demo.progress import LiveMessage
from equipoise.demo.settings import VariantName

Move = tuple[int, int, int, int]
"""Layer, expert, from rank (`HOST` for the host's memory), to rank."""


@dataclass(frozen=True, kw_only=True)
class LiveSetup:
    """What is known of a run before it begins.

    Attributes:
        ranks: those that share the experts shown.
        layers: of the model.
        experts: of a layer.
        stages: of the pipeline; what is shown is of the first.
        phases: names of the kinds of text, in the order in which they are served.
        switch_steps: the first step of every phase but the first.
        steps: of a pass.
        passes: variants in the order in which they are served.
        tokens: tokens of a step's forward, over all ranks.
        cores: of this machine, where all ranks are on its processors; 0 otherwise.
    """

    ranks: int
    layers: int
    experts: int
    stages: int
    phases: tuple[str, ...]
    switch_steps: tuple[int, ...]
    steps: int
    passes: tuple[str, ...]
    tokens: Callable[[int], int]
    cores: int = 0

    def phase(self, step: int) -> int:
        """Index of the phase that a step belongs to."""
        return sum(step >= switch for switch in self.switch_steps)


@dataclass(frozen=True)
class SampledLoad:
    """The rows of one step; `rows` (layers, ranks)."""

    step: int
    rows: tuple[tuple[int, ...], ...]

    @property
    def mean(self) -> float:
        """Rows of the mean rank, over all layers."""
        return sum(map(sum, self.rows)) / len(self.rows[0])

    @property
    def computed(self) -> tuple[float, ...]:
        """What each rank computes, over the mean of the ranks."""
        return tuple(sum(column) / self.mean for column in zip(*self.rows, strict=True))

    @property
    def length(self) -> float:
        """What the slowest ranks of all layers compute, over the mean: the length of the step."""
        return sum(max(layer) for layer in self.rows) / self.mean

    @property
    def imbalance(self) -> float:
        """max / mean - 1 over ranks, mean over layers; docs/metrics.md."""
        ratios = [max(layer) * len(layer) / sum(layer) - 1 for layer in self.rows if sum(layer)]
        return sum(ratios) / len(ratios)

    @property
    def fullest(self) -> tuple[int, int, float]:
        """The layer and the rank with the most rows over the layer's mean, and how many times."""
        ratio, layer, rank = max(
            (rows * len(layer) / max(sum(layer), 1), number, rank)
            for number, layer in enumerate(self.rows)
            for rank, rows in enumerate(layer)
        )
        return layer, rank, ratio


@dataclass
class OpenRebalance:
    """The last rebalance that began; `phase` is planning, moving or how it ended."""

    number: int
    phase: str = "planning"
    moves: tuple[Move, ...] = ()
    moves_total: int = 0


@dataclass
class Commit:
    """The last rebalance that moved weights, with imbalance of the sampled steps around it."""

    number: int
    step: int
    copies: int
    seconds: float
    before: float | None
    after: float | None = None


@dataclass
class PassFigures:
    """What was seen of one pass."""

    imbalance: dict[int, float] = field(default_factory=dict)
    """By sampled step."""
    commits: list[int] = field(default_factory=list)
    """Steps before which weights were committed."""
    steps_done: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Of all steps so far; None before the first."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def mean_imbalance(self) -> float | None:
        """Of the sampled steps; None where there is none."""
        return sum(self.imbalance.values()) / len(self.imbalance) if self.imbalance else None


@dataclass
class LiveState:
    """All that a frame is drawn from."""

    setup: LiveSetup
    name: str = ""
    """Of the pass that is served; empty before the first."""
    figures: dict[str, PassFigures] = field(default_factory=dict)
    load: SampledLoad | None = None
    rebalance: OpenRebalance | None = None
    commit: Commit | None = None
    text: tuple[str, str] = ("", "")
    """What a request reads, and what the model has written after it."""
    longest: float = 1.25
    """The longest step seen, over its mean: the scale of the bars."""
    missing: int = 0
    """Messages and events that were dropped on the way here."""
    behind: float = 0.0
    """Seconds by which the display is behind the serving."""
    log_line: str = ""
    """The last line that somebody wrote to standard error."""

    @property
    def current(self) -> PassFigures:
        """Of the pass that is served."""
        return self.figures.setdefault(self.name, PassFigures())

    @property
    def step(self) -> int:
        """The step that is shown: that of the load, or the number of steps done without one."""
        return self.load.step if self.load else self.current.steps_done

    @property
    def baseline(self) -> PassFigures | None:
        """The pass without balancing, where another one is served."""
        if self.name == VariantName.UNBALANCED:
            return None
        return self.figures.get(VariantName.UNBALANCED)

    def begin_pass(self, name: str) -> None:
        """A pass over the traffic begins."""
        self.name, self.load, self.rebalance, self.commit = name, None, None, None
        self.text = ("", "")
        self.figures[name] = PassFigures()

    def count_steps(self, done: int) -> None:
        """So many steps of the pass are done, of which no more is known."""
        self.current.steps_done = done

    def update(self, message: LiveMessage) -> None:
        """Take in one message of a `LiveFeed`."""
        match message:
            case {"live": "load", "step": step, "rank_rows": rows, "text": text}:
                self.text = (text[0], text[1])
                self._load(SampledLoad(step, tuple(map(tuple, rows))))
            case {"live": "step", "step": step, "seconds": seconds}:
                figures = self.current
                figures.steps_done = step + 1
                figures.tokens += self.setup.tokens(step)
                figures.seconds += seconds
            case {"live": "state", "state": state, "rebalance": number}:
                self._state(state, number)
            case {"live": "moves", "rebalance": number, "count": count, "moves": moves}:
                shown = tuple((a, b, c, d) for a, b, c, d in moves)
                self.rebalance = OpenRebalance(number, "moving", shown, count)
            case {"live": "ended"}:
                self._ended(message)
            case {"live": "dropped", "count": count}:
                self.missing += count

    def _load(self, load: SampledLoad) -> None:
        if not any(map(sum, load.rows)):
            return  # nothing was routed: there is no mean to compare with
        self.load = load
        self.longest = max(self.longest, load.length, *load.computed)
        self.current.imbalance[load.step] = load.imbalance
        commit = self.commit
        if commit is not None and commit.after is None and load.step >= commit.step:
            commit.after = load.imbalance

    def _state(self, state: str, number: int | None) -> None:
        if number is None:
            return
        if self.rebalance is None or self.rebalance.number != number:
            self.rebalance = OpenRebalance(number)
        if state in ("transferring", "staged", "updating"):
            self.rebalance.phase = "moving"

    def _ended(self, message: LiveMessage) -> None:
        outcome, number = message["outcome"], message["rebalance"]
        if self.rebalance is None or self.rebalance.number != number:
            self.rebalance = OpenRebalance(number)
        completed = outcome in COMPLETED
        self.rebalance.phase = outcome if completed else f"aborted: {outcome}"
        if message["moves"]:
            self.rebalance.moves = tuple((a, b, HOST, d) for a, b, _, d in message["moves"])
            self.rebalance.moves_total = message["copies"]
        if outcome != COMMITTED:
            return
        before = [value for step, value in self.current.imbalance.items() if step < message["step"]]
        self.commit = Commit(
            number=number,
            step=message["step"],
            copies=message["copies"],
            seconds=message["seconds"],
            before=before[-1] if before else None,
        )
        self.current.commits.append(message["step"])
