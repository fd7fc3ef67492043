"""What a replay is asked for, and the candidates that follow from it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.placement import ExpertShape
from equipoise.report.advice.dead_zone import DeadZone
from equipoise.report.advice.hardware import Expert, Hardware, Roofline
from equipoise.report.advice.kv_cache import KvCache
from equipoise.report.advice.sizing import min_slots_per_rank
from equipoise.report.replay.candidate import Candidate, EngineCandidate, OurCandidate, Unbalanced
from equipoise.report.replay.engine_model import Cadence
from equipoise.report.replay.engines import ENGINES
from equipoise.report.replay.player import Link
from equipoise.report.replay.step_price import DeadZonePrice, RooflinePrice, StepPrice
from equipoise.report.replay.steps import StepSource

OURS = "equipoise"


@dataclass(frozen=True, kw_only=True)
class ReplayInputs:
    """A trace, what serves it, and what that costs.

    Attributes:
        source: the trace as steps.
        ranks: that serve.
        nodes: of as many ranks each.
        slots: of a layer, over all ranks; each is replayed.
        engines: names of engines, of `ENGINES` and `OURS`.
        window: steps of load that every balancer plans from; None for each one's default.
        interval: steps from plan to plan; None for each one's default.
        expert: what an expert weighs; None where unknown.
        hardware: of a rank; None where unknown.
        link: that weights move over, a name of `hardware.LINKS`.
        step_seconds: a step without a balancer; None where unknown.
        dead_zone: measured; None for hardware's roofline, or the default where there is none.
        kv_cache: memory beside the experts; None where unknown.
        kv_usage: part of the KV cache that was in use at most, with the fewest slots.
    """

    source: StepSource
    ranks: int
    slots: tuple[int, ...]
    nodes: int = 1
    engines: tuple[str, ...] = (*ENGINES, OURS)
    window: int | None = None
    interval: int | None = None
    expert: Expert | None = None
    hardware: Hardware | None = None
    link: str = "node"
    step_seconds: float | None = None
    dead_zone: DeadZone | None = None
    kv_cache: KvCache | None = None
    kv_usage: float = 1.0

    @property
    def least_slots(self) -> int:
        """With which every expert has one."""
        return min_slots_per_rank(self.source.experts, self.ranks) * self.ranks

    @property
    def transfers(self) -> Link | None:
        """Where the hardware and what an expert weighs are known."""
        if self.hardware is None or self.expert is None:
            return None
        rate = self.hardware.link_bytes_per_second(self.link)
        return Link(rate, self.expert.size, self.step_seconds)

    def price(self, batch: float) -> StepPrice:
        """Of a step; `batch` is the part of the recorded rows that it has."""
        if self.dead_zone is not None:
            return DeadZonePrice(self.dead_zone)
        if self.hardware is not None and self.expert is not None:
            return RooflinePrice(Roofline(self.expert, self.hardware), batch)
        return DeadZonePrice(DeadZone.default(self.ranks))

    def batch(self, slots: int) -> float:
        """Part of the recorded batch that the KV cache has room for beside so many slots.

        The batch was recorded with the fewest slots.
        """
        then, now = self.weight_bytes(slots), self.weight_bytes(self.least_slots)
        if self.kv_cache is None or then is None or now is None:
            return 1.0
        room = self.kv_cache.tokens(now)
        return min(1.0, self.kv_cache.tokens(then) / (room * self.kv_usage)) if room else 1.0

    def weight_bytes(self, slots: int) -> int | None:
        """Of a rank's experts in all layers; None where unknown."""
        if self.expert is None:
            return None
        return slots // self.ranks * len(self.source.layers) * self.expert.size


def candidates(inputs: ReplayInputs) -> Iterator[Candidate]:
    """What is replayed: no balancer first, then engines in order, ours last."""
    yield Unbalanced(_shape(inputs, inputs.least_slots))
    for slots in inputs.slots:
        for name in inputs.engines:
            if name != OURS:
                yield from _of_engine(name, inputs, slots)
    if OURS in inputs.engines:
        for slots in inputs.slots:
            yield from _ours(inputs, slots)
        if inputs.source.experts == inputs.least_slots not in inputs.slots:
            yield from _ours(inputs, inputs.least_slots)


def _shape(inputs: ReplayInputs, slots: int) -> ExpertShape:
    return ExpertShape(len(inputs.source.layers), inputs.source.experts, slots, inputs.ranks)


def _of_engine(name: str, inputs: ReplayInputs, slots: int) -> Iterator[EngineCandidate]:
    """Each dispatch rule, then each further policy with the default rule."""
    new_model = partial(ENGINES[name], len(inputs.source.layers), inputs.nodes)
    shape, names = _shape(inputs, slots), new_model()
    rules = [(number, "") for number in range(len(names.rules))]
    for number, policy in [*rules, *((0, policy) for policy in names.policies)]:
        model = new_model()
        cadence = _cadence(model.cadence, inputs)
        yield EngineCandidate(model, model.rules[number], shape, cadence, policy)


def _cadence(default: Cadence, inputs: ReplayInputs) -> Cadence:
    window, interval = _window_and_interval(default.window, default.interval, inputs)
    first = default.first if interval == default.interval else interval
    return replace(default, window=window, interval=interval, first=first)


def _window_and_interval(window: int, interval: int, inputs: ReplayInputs) -> tuple[int, int]:
    """As asked for; where only one is, the other's default gives way to it."""
    if inputs.window is not None:
        return inputs.window, inputs.interval or max(interval, inputs.window)
    if inputs.interval is not None:
        return min(window, inputs.interval), inputs.interval
    return window, interval


def _ours(inputs: ReplayInputs, slots: int) -> Iterator[OurCandidate]:
    shape = _shape(inputs, slots)
    # The default first: of candidates that are as good, the first is advised.
    modes = sorted(ShareMode, key=lambda mode: mode is not ShareMode.LOCAL)
    if inputs.nodes in (1, inputs.ranks):
        modes.remove(ShareMode.NODE)
    if slots == inputs.source.experts:
        modes = [ShareMode.STATIC]  # shares have nothing to divide
    default = BalancerConfig()
    window, interval = _window_and_interval(default.window_size, default.step_interval, inputs)
    for mode in modes:
        config = BalancerConfig(
            shares=mode, nodes=inputs.nodes, window_size=window, step_interval=interval
        )
        yield OurCandidate(mode, shape, config, inputs.nodes)
