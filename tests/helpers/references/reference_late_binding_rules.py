"""The rules that bind late; `slow_policies` says what all have in common."""

from collections.abc import Iterable
from functools import reduce
from itertools import combinations
from math import ceil, inf, sqrt
from operator import add

from helpers.references.reference_front_end import SlowFront, SlowRequest
from helpers.references.reference_random import SlowLengths

from equipoise.balancer.requests.policy import WorkerState
from equipoise.balancer.requests.policy_settings import Predictor, RoutingPolicySettings


def total(values: Iterable[float]) -> float:
    """In order, without the corrections that later Pythons make."""
    return reduce(add, values, 0.0)


class Br0:
    """The set of requests that makes the imbalance drop most, by the definition of imbalance."""

    queues = False

    def __init__(self, settings: RoutingPolicySettings, workers: int) -> None:
        self.settings = settings
        self.lengths = SlowLengths()

    def finished(self, made: int) -> None:
        self.lengths.add(made)

    def begin(self, front: SlowFront) -> None: ...
    def joined(self, front: SlowFront, worker: int, size: int) -> None: ...

    def score(self, front: SlowFront, worker: int, size: int) -> float:
        loads = [front.load(w) for w in range(front.size)]
        before = front.present * max(loads) - sum(loads)
        loads[worker] += size
        return before - (front.present * max(loads) - sum(loads))

    def dispatch(self, front: SlowFront) -> None:
        self.begin(front)
        passed_over: set[int] = set()
        while front.pool:
            free = {w: front.free(w) for w in range(front.size) if front.free(w)}
            able = [w for w in free if w not in passed_over]
            if not able:
                return
            worker = min(able, key=lambda w: (-free[w], front.load(w), w))
            many = sum(free.values()) > self.settings.greedy_slots
            requests = self.one(front, worker) if many else self.several(front, worker)
            if not requests:
                passed_over.add(worker)
            for request in requests:
                self.joined(front, worker, request.size)
                front.bind(request, worker)

    def one(self, front: SlowFront, worker: int) -> list[SlowRequest]:
        return self.best(front, worker, front.pool[: self.settings.candidates])

    def best(self, front: SlowFront, worker: int, among: list[SlowRequest]) -> list[SlowRequest]:
        fitting = [request for request in among if front.fits(worker, request.size)]
        scores = [self.score(front, worker, request.size) for request in fitting]
        return [fitting[scores.index(max(scores))]] if scores else []

    def several(self, front: SlowFront, worker: int) -> list[SlowRequest]:
        """The best subset of the first few; where none gains, the best one, so nobody starves."""
        first = front.pool[: self.settings.subset]
        best: list[SlowRequest] = []
        highest = -inf
        for subset in self.subsets(first):
            size = sum(request.size for request in subset)
            if len(subset) > front.free(worker) or not front.fits(worker, size):
                continue
            score = self.score(front, worker, size)
            if score > highest:
                best, highest = subset, score
        return best if highest > 0 else self.best(front, worker, first)

    def subsets(self, first: list[SlowRequest]) -> list[list[SlowRequest]]:
        count = range(len(first))
        sets = [c for k in count for c in combinations(count, k + 1)]
        return [[first[i] for i in c] for c in sorted(sets, key=lambda c: sum(2**i for i in c))]


class Brh(Br0):
    """F = alpha (sum of gamma^h) D - beta sum of gamma^h (D - m_h)+, over steps 0 to H."""

    def begin(self, front: SlowFront) -> None:
        steps = range(self.settings.horizon + 1)
        self.loads = [[self.projected(front, w, h) for h in steps] for w in range(front.size)]

    def projected(self, front: SlowFront, worker: int, ahead: int) -> int:
        """A request keeps its weight until it ends, as in the published code."""
        alive = [r for r in front.members(worker) if ahead < self.end(r)]
        others = (front.workers[worker].others or (0, 0))[0]
        return others + front.alike(worker) * sum(r.weight for r in alive)

    def end(self, request: SlowRequest) -> float:
        """The step by which it has ended: the present one is still made."""
        horizon = self.settings.horizon
        if self.settings.predictor is Predictor.ORACLE and request.expected is not None:
            remaining: float = request.expected - request.made
        elif not self.lengths.output_lengths:
            remaining = horizon
        else:
            remaining = self.lengths.remaining(request.made, horizon)
        return inf if remaining >= horizon else max(1, ceil(remaining))

    def joined(self, front: SlowFront, worker: int, size: int) -> None:
        growth = front.alike(worker) * size
        self.loads[worker] = [load + growth for load in self.loads[worker]]

    def score(self, front: SlowFront, worker: int, size: int) -> float:
        gamma, total = self.settings.gamma, 0.0
        beta = self.settings.beta or front.present
        for h in range(self.settings.horizon + 1):
            margin = max(loads[h] for loads in self.loads) - self.loads[worker][h]
            drop = self.settings.alpha * size - beta * max(0, size - margin)
            total += gamma**h * drop
        return total


class Fit:
    """The emptiest worker to the level that all will have once the free slots are filled.

    In the doubles of the definition: sums go by number of worker.
    """

    queues = False

    def __init__(self, settings: RoutingPolicySettings, workers: int) -> None:
        self.settings = settings
        # Without a clock, or with so few steps as in a comparison, none is fitted.
        self.prompt_weight = settings.prompt_weight or 0.0
        self.output_lengths: list[int] = []
        self.looked: int | None = None
        self.lost_work = 0.0
        self.bound, self.mean_wait = 0, 0.0
        self.level = 0.0

    def finished(self, made: int) -> None:
        self.output_lengths.append(made)

    def dispatch(self, front: SlowFront) -> None:
        if self.gathers(front) or not self.serving(front):
            return
        self.level = self.level_of(front)
        while front.pool:
            free = sum(front.free(w) for w in range(front.size))
            if not free:
                return
            bound = self.fill(front) if len(front.pool) >= free else self.spread(front)
            if bound is None:
                return
            self.note_wait(front, bound[0])
            front.bind(*bound)

    def note_wait(self, front: SlowFront, request: SlowRequest) -> None:
        """A mean that forgets: of about the latest 512."""
        waited = 0 if request.seen is None else front.steps - request.seen
        self.bound += 1
        self.mean_wait += (waited - self.mean_wait) / min(self.bound, 512)

    def gathers(self, front: SlowFront) -> bool:
        """Whether requests wait for each other, until as much is lost as one prompt costs alone."""
        serving = self.serving(front)
        running = sum(request.begun for w in serving for request in front.members(w))
        free = sum(front.free(w) for w in serving)
        prompt_cost = self.settings.prefill_wait * self.prompt_weight * self.settings.lockstep
        since, self.looked = self.looked, None
        if not prompt_cost or not free or not running or all(front.free(w) for w in serving):
            return False
        if since is None:
            since, self.lost_work = front.made, 0.0
        self.lost_work += (
            (front.made - since) / running * self.idle(front, free) * self.envelope(front)
        )
        if self.lost_work >= prompt_cost * self.missing(front, free):
            return False
        self.looked = front.made
        return True

    def idle(self, front: SlowFront, free: int) -> float:
        """The part of a step that is lost: of the slots, or for somebody who need not wait."""
        serving = self.serving(front)
        slots = total(float(front.workers[w].slots) for w in serving)
        usable_slots = total(float(front.free(w)) for w in serving if not self.too_heavy(front, w))
        return usable_slots / slots if len(front.pool) >= free else 1.0

    def too_heavy(self, front: SlowFront, worker: int) -> bool:
        """Its load is far above the mean and above its share, by its part of what all can run."""
        serving = self.serving(front)
        loads = {w: float(front.load(w)) for w in serving}
        all_loads = total(loads.values())
        requests = sum(front.count(w) for w in serving)
        weight = all_loads / requests if requests else 1.0
        capacity = {
            w: min(front.workers[w].slots * weight, float(front.workers[w].room)) for w in serving
        }
        capacities = total(capacity.values())
        per_token = all_loads / capacities if capacities else 0.0
        shares = {w: per_token * capacity[w] for w in serving}
        squares = total((loads[w] - shares[w]) * (loads[w] - shares[w]) for w in serving)
        most = max(all_loads / len(serving), shares[worker])
        return loads[worker] > most + self.settings.slack * sqrt(squares / len(serving))

    def envelope(self, front: SlowFront) -> int:
        return max(front.load(w) for w in self.serving(front))

    def missing(self, front: SlowFront, free: int) -> float:
        """Prompt tokens to compute, on the mean of the first requests, where most is cached."""
        first = front.pool[: min(free, self.settings.window)]
        return sum(max(0, r.size - max(r.hits, default=0)) for r in first) / len(first)

    def end(self, front: SlowFront, worker: int) -> float:
        """Where it will stand once its free slots are filled."""
        return front.load(worker) + front.free(worker) * self.mean_size(front)

    def level_of(self, front: SlowFront) -> float:
        """Of what waits as a decision begins: it does not move with what is bound."""
        ends = [self.end(front, w) for w in self.serving(front)]
        return total(ends) / len(ends)

    def fill(self, front: SlowFront) -> tuple[SlowRequest, int] | None:
        """The request nearest to what the emptiest needs of those that are not too heavy."""
        mean = self.mean_size(front)
        ends = {w: self.end(front, w) for w in self.serving(front) if front.free(w)}
        for worker in sorted(ends, key=lambda w: ends[w]):
            if self.too_heavy(front, worker):
                continue
            request = self.nearest(front, worker, self.level - (ends[worker] - mean))
            if request is not None:
                return request, worker
        return None

    def mean_size(self, front: SlowFront) -> float:
        """Of all that wait."""
        return sum(request.size for request in front.pool) / len(front.pool)

    def overshoot(self, front: SlowFront, worker: int) -> float:
        """What a token above the level costs, in tokens below it: all wait for the fullest."""
        workers = front.workers
        present = [w for w in range(front.size) if workers[w].state is not WorkerState.LOST]
        fullest = max(self.end(front, w) for w in present)
        waiting = 1.0 if self.end(front, worker) == fullest else 0.0
        return max(1.0, max(waiting, self.settings.overshoot) * front.present)

    def serving(self, front: SlowFront) -> list[int]:
        return [w for w in range(front.size) if front.serves(w)]

    def nearest(self, front: SlowFront, worker: int, need: float) -> SlowRequest | None:
        window = front.pool[: self.settings.window]
        for request in window:
            request.seen = front.steps if request.seen is None else request.seen
        mean_size, overshoot = self.mean_size(front), self.overshoot(front, worker)

        def cost(request: SlowRequest) -> float:
            waiting_time = front.steps - (request.seen or 0)
            distance = request.size - need
            away = overshoot * distance if distance > 0 else -distance
            patience = mean_size * self.wait_credit(waiting_time)
            return away - patience - self.credit(request, worker)

        fitting = [request for request in window if front.fits(worker, request.size)]
        return min(fitting, key=cost, default=None)

    def wait_credit(self, steps: int) -> float:
        """In mean sizes: in proportion, and by the square of half of what exceeds eight times what
        those that were bound had waited."""
        excess = self.settings.wait_bonus * max(0.0, steps - 8 * self.mean_wait)
        return self.settings.wait_bonus * steps + excess * excess / 4

    def spread(self, front: SlowFront) -> tuple[SlowRequest, int] | None:
        """The largest to the lightest, by what its cache saves lighter still."""
        window = front.pool[: self.settings.window]
        for request in sorted(window, key=lambda request: -request.size):
            able = [w for w in range(front.size) if front.fits(w, request.size)]
            if able:
                return request, min(able, key=lambda w: self.cost(front, request, w))
        return None

    def cost(self, front: SlowFront, request: SlowRequest, worker: int) -> float:
        """Load costs at one of all workers, a prompt at each."""
        return front.load(worker) - front.present * self.credit(request, worker)

    def credit(self, request: SlowRequest, worker: int) -> float:
        """Computing a token is paid once, reading one at every step of a mean output."""
        total_output = sum(self.output_lengths)
        if worker >= len(request.hits) or not self.prompt_weight or not total_output:
            return 0.0
        mean_output = total_output / len(self.output_lengths)
        return self.prompt_weight * request.hits[worker] / mean_output
