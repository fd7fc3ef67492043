"""The published rules that bind at once; `slow_policies` says what all have in common."""

from collections.abc import Callable
from fractions import Fraction

from helpers.references.reference_front_end import SlowFront, SlowRequest
from helpers.references.reference_random import Dice, SlowLengths

from equipoise.balancer.requests.policy_settings import RoutingPolicySettings, WhenFull


class Push:
    """Binds every request in turn, to the worker with the least score."""

    def __init__(self, settings: RoutingPolicySettings, workers: int) -> None:
        self.settings = settings
        self.start = 0
        self.prepare(workers)

    def prepare(self, workers: int) -> None: ...

    @property
    def queues(self) -> bool:
        return self.settings.when_full is WhenFull.QUEUE

    def finished(self, made: int) -> None: ...

    def dispatch(self, front: SlowFront) -> None:
        self.begin(front)
        while front.pool:
            request = front.pool[0]
            worker = self.choose(front, request, self.takers(front, request))
            if worker is None:
                return
            front.bind(request, worker)
            front.workers[worker].picks.append(request.size)
            self.picked(front, request, worker)

    def takers(self, front: SlowFront, request: SlowRequest) -> list[int]:
        takes = front.serves if self.queues else lambda worker: front.fits(worker, request.size)
        return [worker for worker in range(front.size) if takes(worker)]

    def choose(self, front: SlowFront, request: SlowRequest, takers: list[int]) -> int | None:
        def key(worker: int) -> tuple[object, int]:
            return self.score(front, worker), (worker - self.start) % front.size

        return min(takers, key=key, default=None)

    def begin(self, front: SlowFront) -> None: ...
    def picked(self, front: SlowFront, request: SlowRequest, worker: int) -> None: ...
    def score(self, front: SlowFront, worker: int) -> object:
        return 0


class Random(Push):
    """From a random start on, the first that takes it."""

    def prepare(self, workers: int) -> None:
        self.dice = Dice(self.settings.seed)

    def choose(self, front: SlowFront, request: SlowRequest, takers: list[int]) -> int | None:
        self.start = self.dice.below(front.size)
        return super().choose(front, request, takers)


class RoundRobin(Push):
    """The one after the last."""

    def picked(self, front: SlowFront, request: SlowRequest, worker: int) -> None:
        self.start = (worker + 1) % front.size


class PowerOfTwo(Push):
    """Two are drawn, without replacement; equal: the one drawn first."""

    def prepare(self, workers: int) -> None:
        self.dice = Dice(self.settings.seed)

    def choose(self, front: SlowFront, request: SlowRequest, takers: list[int]) -> int | None:
        if not takers:
            return None
        candidates = []
        for _ in range(min(2, len(takers))):
            others = [worker for worker in takers if worker not in candidates]
            candidates.append(others[self.dice.below(len(others))])
        return min(candidates, key=front.count)


class Jsq(Push):
    """Fewest requests."""

    def score(self, front: SlowFront, worker: int) -> object:
        return front.count(worker)


class JsqLoad(Push):
    """Fewest KV tokens: argmin L_g."""

    def score(self, front: SlowFront, worker: int) -> object:
        return front.load(worker)


class VllmLegacy(Push):
    """argmin 4 waiting + running of a snapshot; a pick waits once for every front end."""

    def prepare(self, workers: int) -> None:
        self.start = workers * self.settings.front_end // self.settings.front_ends

    def waiting(self, front: SlowFront, worker: int) -> int:
        state = front.workers[worker]
        return state.report.waiting + self.settings.front_ends * len(state.picks)

    def score(self, front: SlowFront, worker: int) -> object:
        return 4 * self.waiting(front, worker) + front.workers[worker].report.running


class Vllm(VllmLegacy):
    """max(front ends * own, waiting + running) + 6 waiting (KV use - 1/2)+, rotating start."""

    def score(self, front: SlowFront, worker: int) -> object:
        report, waiting = front.workers[worker].report, self.waiting(front, worker)
        own = self.settings.front_ends * len(front.members(worker))
        pressure = max(0.0, report.kv_usage - 0.5)
        return max(own, waiting + report.running) + waiting * 6 * pressure

    def picked(self, front: SlowFront, request: SlowRequest, worker: int) -> None:
        self.start = (self.start + 1) % front.size


class SglangTokens(Push):
    """argmin (tokens, requests) of a snapshot, own picks since counted in both."""

    def score(self, front: SlowFront, worker: int) -> object:
        state = front.workers[worker]
        requests = state.report.waiting + state.report.running + len(state.picks)
        return state.report.tokens + sum(state.picks), requests


class FastPhi(Push):
    """argmin of sum over points h of w_h S(h) (s + h - m_g(h))+, w_h of the trapezoid rule.

    In fractions. Sums of doubles that should be equal may not be, so a tie is whoever `follow`
    says has won it.
    """

    follow: Callable[[int], int | None] = staticmethod(lambda _name: None)

    def prepare(self, workers: int) -> None:
        self.lengths = SlowLengths()

    def finished(self, made: int) -> None:
        self.lengths.add(made)

    def survival(self, age: int, ahead: int) -> Fraction:
        return Fraction(*self.lengths.survival(age, ahead))

    def begin(self, front: SlowFront) -> None:
        last = self.settings.points - 1
        at = [self.lengths.quantile(k / last) for k in range(1, last + 1)]
        self.points = [0, *at] if self.lengths.output_lengths else [0]
        ends = [self.points[0], *self.points, self.points[-1]]
        widths = [Fraction(high - low, 2) for low, high in zip(ends, ends[2:], strict=False)]
        self.weights = [
            width * self.survival(0, h) for width, h in zip(widths, self.points, strict=True)
        ]
        if not self.lengths.output_lengths:
            self.weights = [Fraction(1)]
        self.loads = [[self.expected(front, w, h) for h in self.points] for w in range(front.size)]

    def expected(self, front: SlowFront, worker: int, ahead: int) -> Fraction:
        if ahead == 0:
            return Fraction(front.load(worker))
        alive = (self.survival(r.made, ahead) * (r.weight + ahead) for r in front.members(worker))
        others = (front.workers[worker].others or (0, 0))[0]
        return others + front.alike(worker) * sum(alive, Fraction(0))

    def overflow(self, worker: int, size: int) -> Fraction:
        total = Fraction(0)
        for k, (h, weight) in enumerate(zip(self.points, self.weights, strict=True)):
            margin = max(loads[k] for loads in self.loads) - self.loads[worker][k]
            total += weight * max(Fraction(0), size + h - margin)
        return total

    def choose(self, front: SlowFront, request: SlowRequest, takers: list[int]) -> int | None:
        scores = {worker: self.overflow(worker, request.size) for worker in takers}
        best = min(takers, key=lambda w: (scores[w], front.load(w), w), default=None)
        followed = self.follow(request.name)
        if best is None or followed not in scores:
            return best
        near = abs(scores[followed] - scores[best]) <= scores[best] * Fraction(1, 10**9)
        tied = scores[followed] != scores[best] or front.load(followed) == front.load(best)
        return followed if near and tied else best

    def picked(self, front: SlowFront, request: SlowRequest, worker: int) -> None:
        for k, h in enumerate(self.points):
            lives = self.survival(0, h) if self.lengths.output_lengths else 1
            self.loads[worker][k] += front.alike(worker) * lives * (request.size + h)
