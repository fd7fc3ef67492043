"""Published rules with one thing wrong each: a comparison with a native policy has to notice.

As many ways in which a native policy could be wrong and the rule right.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf
from typing import Any

from helpers.references.reference_front_end import SlowFront, SlowRequest
from helpers.references.reference_late_binding_rules import Br0, Brh, Fit
from helpers.references.reference_prefix_rules import (
    ByPrefix,
    Dynamo,
    LlmD,
    SglangCache,
    TpuInference,
    to_compute,
)
from helpers.references.reference_push_rules import (
    FastPhi,
    Jsq,
    JsqLoad,
    PowerOfTwo,
    Random,
    RoundRobin,
    SglangTokens,
    Vllm,
    VllmLegacy,
)

from equipoise.balancer.requests.policy import Capacity
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings


def _unchanged(settings: RoutingPolicySettings) -> RoutingPolicySettings:
    return settings


@dataclass(frozen=True)
class Mutant:
    """Policy `name` with `changes` in place of what its slow class, or the front end, has, and
    with settings that `misread` makes of those that it is given."""

    broken: str
    name: str
    policy: type
    changes: dict[str, object] = field(default_factory=dict)
    of_front: bool = False
    misread: Callable[[RoutingPolicySettings], RoutingPolicySettings] = _unchanged

    def front(self, settings: RoutingPolicySettings, workers: Sequence[Capacity]) -> SlowFront:
        """As `slow_front`, broken."""
        rule: Any = type("Broken", (self.policy,), {} if self.of_front else self.changes)
        front: Any = type("Broken", (SlowFront,), self.changes if self.of_front else {})
        policy = rule(self.misread(settings), len(workers))
        front_end = front(policy, workers, settings.front_ends)
        assert isinstance(front_end, SlowFront)
        front_end.lockstep = settings.lockstep
        return front_end


def _misread(
    broken: str, policy: type, misread: Callable[[RoutingPolicySettings], RoutingPolicySettings]
) -> Mutant:
    return Mutant(broken, policy.__name__.lower(), policy, misread=misread)


def _legacy(self: VllmLegacy, front: SlowFront, worker: int) -> object:
    return 3 * self.waiting(front, worker) + front.workers[worker].report.running


def _vllm(self: Vllm, front: SlowFront, worker: int) -> object:
    report, waiting = front.workers[worker].report, self.waiting(front, worker)
    own = self.settings.front_ends * len(front.members(worker))
    return max(own, waiting + report.running) + waiting * 6 * max(0.0, report.kv_usage - 0.6)


def _own_only(self: Vllm, front: SlowFront, worker: int) -> object:
    return self.settings.front_ends * len(front.members(worker))


def _unpicked(self: SglangTokens, front: SlowFront, worker: int) -> object:
    report = front.workers[worker].report
    return report.tokens, report.waiting + report.running


def _nothing_cached(
    self: ByPrefix, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]
) -> object:
    return front.pending(worker) + front.load(worker)


def _load_only(
    self: ByPrefix, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]
) -> object:
    return to_compute(front, request, worker)


def _nothing_pending(
    self: ByPrefix, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]
) -> object:
    return request.size - request.cached(worker), front.count(worker)


_llm_d = LlmD.cost


def _prefix_once(
    self: LlmD, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]
) -> float:
    hit = request.cached(worker) / request.size
    return hit + _llm_d(self, front, request, worker, takers)


def _unpicked_queue(self: LlmD, front: SlowFront, worker: int) -> int:
    return front.workers[worker].report.waiting


def _trees_of_all(self: SglangCache, front: SlowFront, request: SlowRequest, worker: int) -> None:
    self.trees[worker] = self.trees.get(worker, 0) + request.size


def _same_twice(
    self: PowerOfTwo, front: SlowFront, request: SlowRequest, takers: list[int]
) -> int | None:
    candidates = [takers[self.dice.below(len(takers))] for _ in takers[:2]]
    return min(candidates, key=front.count, default=None)


def _unweighted(self: Br0, front: SlowFront, worker: int, size: int) -> float:
    loads = [front.load(w) for w in range(front.size)]
    return size - max(0, size - (max(loads) - loads[worker]))


def _starving(self: Br0, front: SlowFront, worker: int) -> list[SlowRequest]:
    requests = Br0.several(self, front, worker)
    size = sum(request.size for request in requests)
    return requests if requests and self.score(front, worker, size) > 0 else []


def _last_best(
    self: Br0, front: SlowFront, worker: int, among: list[SlowRequest]
) -> list[SlowRequest]:
    fitting = [request for request in among if front.fits(worker, request.size)]
    return fitting and [max(reversed(fitting), key=lambda r: self.score(front, worker, r.size))]


def _growing(self: Brh, front: SlowFront, worker: int, ahead: int) -> int:
    alive = [r for r in front.members(worker) if ahead < self.end(r)]
    others = (front.workers[worker].others or (0, 0))[0]
    return others + front.alike(worker) * sum(r.weight + ahead for r in alive)


def _endless(self: Brh, request: SlowRequest) -> float:
    return inf


def _ended_early(self: Brh, request: SlowRequest) -> float:
    return Brh.end(self, request) - 1


def _unaged(self: FastPhi, front: SlowFront, worker: int, ahead: int) -> Fraction:
    alive = sum((r.weight + ahead for r in front.members(worker)), 0) * self.survival(0, ahead)
    return (front.workers[worker].others or (0, 0))[0] + front.alike(worker) * alive


def _overflow_of_now(self: FastPhi, worker: int, size: int) -> Fraction:
    margin = max(row[0] for row in self.loads) - self.loads[worker][0]
    return max(Fraction(0), size - margin)


_fill = Fit.fill


def _to_the_level(self: Fit, front: SlowFront, worker: int, need: float) -> SlowRequest | None:
    return Fit.nearest(self, front, worker, need / 2)


def _moving_level(self: Fit, front: SlowFront) -> tuple[SlowRequest, int] | None:
    self.level = self.level_of(front)
    return _fill(self, front)


def _alike_when_fullest(self: Fit, front: SlowFront, worker: int) -> float:
    return max(1.0, self.settings.overshoot * front.present)


def _smallest(self: Fit, front: SlowFront) -> tuple[SlowRequest, int] | None:
    for request in sorted(front.pool[: self.settings.window], key=lambda r: r.size):
        able = [w for w in range(front.size) if front.fits(w, request.size)]
        if able:
            return request, min(able, key=lambda w: front.load(w) - self.credit(request, w))
    return None


def _pool_behind(self: SlowFront, worker: int) -> set[int]:
    there = self.members(worker)
    lost_names = SlowFront.lose(self, worker)
    for request in there:
        self.arrivals += 1
        request.order = self.arrivals
    return lost_names


def _saved_once(self: Fit, front: SlowFront, request: SlowRequest, worker: int) -> float:
    return front.load(worker) - self.credit(request, worker)


def _all_missing(self: Fit, front: SlowFront, free: int) -> float:
    first = front.pool[: min(free, self.settings.window)]
    return sum(request.size for request in first) / len(first)


def _slots_idle(self: Fit, front: SlowFront, free: int) -> float:
    return free / sum(front.workers[w].slots for w in self.serving(front))


def _unwanted_idle(self: Fit, front: SlowFront, free: int) -> float:
    return _slots_idle(self, front, free) if len(front.pool) >= free else 1.0


def _reported_twice(self: SlowFront, worker: int) -> int:
    mine = sum(request.weight for request in self.members(worker))
    return mine * self.front_ends + (self.workers[worker].others or (0, 0))[0]


def _draining_takes(self: SlowFront, worker: int) -> bool:
    return self.workers[worker].state.value != "lost"


def _nobody_stranded(self: SlowFront) -> list[SlowRequest]:
    return self._waiting(False)


def _lost_counts(self: SlowFront) -> int:
    return len(self.workers)


def _decides_within_steps(self: SlowFront, arrival: bool) -> list[tuple[int, int]]:
    if self.step_has_tokens and not self.expected:
        self.end_step()
    return self.decide()


def _arrival_always_waits(self: SlowFront, arrival: bool) -> list[tuple[int, int]]:
    return SlowFront.dispatch_between_steps(self, False)


def _hears_one_token_a_step(self: SlowFront, names: Iterable[int]) -> None:
    self.overdue = False


def _heavy_by_the_mean(self: Fit, front: SlowFront, worker: int) -> bool:
    """However many slots it has."""
    serving = self.serving(front)
    loads = [front.load(w) for w in serving]
    mean = sum(loads) / len(loads)
    deviation = (sum((load - mean) ** 2 for load in loads) / len(loads)) ** 0.5
    return bool(front.load(worker) > mean + self.settings.slack * deviation)


def _linear_wait(self: Fit, steps: int) -> float:
    return self.settings.wait_bonus * steps


def _step_for_each_event(self: SlowFront, tokens: int) -> None:
    self.steps += 1


def _ends_pass_no_time(self: SlowFront, name: int) -> None:
    steps = self.steps
    SlowFront.finish(self, name)
    if not self.lockstep:
        self.steps = steps


def _always_in_lockstep(self: SlowFront, names: Iterable[int]) -> None:
    SlowFront.begin_event(self, names)
    self.overdue = False


def _end_is_of_the_next_step(self: SlowFront, name: int) -> None:
    if self.requests[name].begun and name not in self.with_token:
        self.count_token(name)
    SlowFront.finish(self, name)


def _waits_for_the_gone(self: SlowFront, name: int) -> None:
    del self.requests[name]


def _waits_for_everybody(self: SlowFront, request: SlowRequest, worker: int) -> None:
    self.begins_at_once = True
    SlowFront.bind(self, request, worker)


MUTANTS = (
    Mutant("nothing is drawn", "random", Random, {"choose": Jsq.choose}),
    Mutant("round robin always begins anew", "round_robin", RoundRobin, {"picked": Jsq.picked}),
    Mutant("two choices may be one", "power_of_two", PowerOfTwo, {"choose": _same_twice}),
    Mutant("the shortest queue is the lightest", "jsq", Jsq, {"score": JsqLoad.score}),
    Mutant("the lightest is the shortest queue", "jsq_load", JsqLoad, {"score": Jsq.score}),
    Mutant("a waiting request weighs three", "vllm_legacy", VllmLegacy, {"score": _legacy}),
    Mutant("pressure begins at 0.6", "vllm", Vllm, {"score": _vllm}),
    Mutant("reports are not looked at", "vllm", Vllm, {"score": _own_only}),
    Mutant("the start does not rotate", "vllm", Vllm, {"picked": Jsq.picked}),
    Mutant("picks do not count", "sglang_tokens", SglangTokens, {"score": _unpicked}),
    Mutant("cached blocks are computed", "dynamo", Dynamo, {"cost": _nothing_cached}),
    Mutant("loads do not count", "dynamo", Dynamo, {"cost": _load_only}),
    Mutant(
        "prompts under way do not count", "tpu_inference", TpuInference, {"cost": _nothing_pending}
    ),
    Mutant("a prefix counts once", "llm_d", LlmD, {"cost": _prefix_once}),
    Mutant("a pick does not wait", "llm_d", LlmD, {"queue": _unpicked_queue}),
    Mutant(
        "what was cached is cached again", "sglang_cache", SglangCache, {"picked": _trees_of_all}
    ),
    Mutant("overflow costs one worker only", "br0", Br0, {"score": _unweighted}),
    Mutant("who gains nothing starves", "br0", Br0, {"several": _starving}),
    Mutant("no subset is looked for", "br0", Br0, {"several": Br0.one}),
    Mutant("of equals the last is taken", "br0", Br0, {"best": _last_best}),
    _misread("a slot more is many", Br0, lambda s: replace(s, greedy_slots=s.greedy_slots + 1)),
    Mutant("survivors grow", "brh", Brh, {"projected": _growing}),
    Mutant("nobody ends", "brh", Brh, {"end": _endless}),
    Mutant("everybody ends a step early", "brh", Brh, {"end": _ended_early}),
    _misread(
        "the horizon is a step nearer", Brh, lambda s: replace(s, horizon=max(0, s.horizon - 1))
    ),
    _misread("the future counts as now", Brh, lambda s: replace(s, gamma=1.5 - s.gamma)),
    Mutant("survival forgets ages", "fast_phi", FastPhi, {"expected": _unaged}),
    Mutant("only this step's overflow counts", "fast_phi", FastPhi, {"overflow": _overflow_of_now}),
    Mutant("half of what is needed is given", "fit", Fit, {"nearest": _to_the_level}),
    Mutant("the level moves with each request", "fit", Fit, {"fill": _moving_level}),
    Mutant("the fullest holds up no more", "fit", Fit, {"overshoot": _alike_when_fullest}),
    Mutant("the smallest go first", "fit", Fit, {"spread": _smallest}),
    _misread("nobody ages", Fit, lambda s: replace(s, wait_bonus=0.0)),
    _misread("the window is wider", Fit, lambda s: replace(s, window=s.window + 1)),
    Mutant("more slots allow no more load", "fit", Fit, {"too_heavy": _heavy_by_the_mean}),
    Mutant("a long wait is worth no more", "fit", Fit, {"wait_credit": _linear_wait}),
    Mutant("many tokens are one step", "fit", Fit, {"pass_steps": _step_for_each_event}, True),
    Mutant("ends without tokens pass no time", "fit", Fit, {"finish": _ends_pass_no_time}, True),
    _misread("there is more slack", Fit, lambda s: replace(s, slack=s.slack + 0.5)),
    _misread("too much is as bad as too little", Fit, lambda s: replace(s, overshoot=0.0)),
    _misread("cached tokens earn nothing", Fit, lambda s: replace(s, prompt_weight=0.0)),
    Mutant("cached tokens count once", "fit", Fit, {"cost": _saved_once}),
    _misread("nobody waits for others", Fit, lambda s: replace(s, prefill_wait=0.0)),
    _misread(
        "others are waited for twice as long",
        Fit,
        lambda s: replace(s, prefill_wait=2 * s.prefill_wait),
    ),
    Mutant("cached prompts are waited for", "fit", Fit, {"missing": _all_missing}),
    Mutant("who need not wait loses little", "fit", Fit, {"idle": _slots_idle}),
    Mutant("slots that nobody would fill are lost", "fit", Fit, {"idle": _unwanted_idle}),
    Mutant("who lost its worker goes last", "fit", Fit, {"lose": _pool_behind}, True),
    Mutant("others count though reported", "jsq_load", JsqLoad, {"load": _reported_twice}, True),
    Mutant("draining workers take requests", "jsq", Jsq, {"serves": _draining_takes}, True),
    Mutant(
        "who fits nowhere stands in the window",
        "fit",
        Fit,
        {"pool": property(_nobody_stranded)},
        True,
    ),
    Mutant(
        "half of a step is ground enough",
        "fit",
        Fit,
        {"dispatch_between_steps": _decides_within_steps},
        True,
    ),
    Mutant(
        "an arrival waits where slots are free",
        "jsq",
        Jsq,
        {"dispatch_between_steps": _arrival_always_waits},
        True,
    ),
    Mutant(
        "a second token ends no step",
        "jsq_load",
        JsqLoad,
        {"begin_event": _hears_one_token_a_step},
        True,
    ),
    Mutant(
        "who is stuck delays a decision twice",
        "br0",
        Br0,
        {"begin_event": _always_in_lockstep},
        True,
    ),
    Mutant("an end alone begins a step", "fit", Fit, {"finish": _end_is_of_the_next_step}, True),
    Mutant("who has left is waited for", "br0", Br0, {"forget": _waits_for_the_gone}, True),
    Mutant("long prompts are waited for", "fit", Fit, {"bind": _waits_for_everybody}, True),
    Mutant("the lost meet at the barrier", "br0", Br0, {"present": property(_lost_counts)}, True),
)
