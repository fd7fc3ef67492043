"""The published rules that look at what is cached of a prompt; `slow_push` has what they share."""

from helpers.references.reference_front_end import SlowFront, SlowRequest
from helpers.references.reference_push_rules import Push


class ByPrefix(Push):
    """Binds at once, to the worker with the least cost of that request; equal: the first."""

    def choose(self, front: SlowFront, request: SlowRequest, takers: list[int]) -> int | None:
        return min(takers, key=lambda w: (self.cost(front, request, w, takers), w), default=None)

    def cost(
        self, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]
    ) -> object:
        raise NotImplementedError


def to_compute(front: SlowFront, request: SlowRequest, worker: int) -> int:
    """Prompt tokens, with this request there too."""
    return front.pending(worker) + request.size - request.cached(worker)


class Dynamo(ByPrefix):
    """prefill + decode blocks, in tokens."""

    def cost(
        self, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]
    ) -> object:
        return to_compute(front, request, worker) + front.load(worker)


class TpuInference(ByPrefix):
    """(pending prefill + prompt - cached, requests)."""

    def cost(
        self, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]
    ) -> object:
        return to_compute(front, request, worker), front.count(worker)


class LlmD(ByPrefix):
    """2 prefix + 1 free KV + 1 queue, the most; a pick waits until the next report."""

    def cost(self, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]) -> float:
        queues = {w: self.queue(front, w) for w in takers}
        longest, shortest = max(queues.values()), min(queues.values())
        queue = 1.0
        if longest > shortest:
            queue = (longest - queues[worker]) / (longest - shortest)
        hit = request.cached(worker) / request.size
        return -(2 * hit + (1 - front.workers[worker].report.kv_usage) + queue)

    def queue(self, front: SlowFront, worker: int) -> int:
        state = front.workers[worker]
        return state.report.waiting + len(state.picks)


class SglangCache(ByPrefix):
    """Fewest requests if max - min > 64 and max > 1.5 min; else most of the prompt, if above 0.3 of
    it; else the smallest tree."""

    def prepare(self, workers: int) -> None:
        self.trees: dict[int, int] = {}

    def cost(
        self, front: SlowFront, request: SlowRequest, worker: int, takers: list[int]
    ) -> object:
        counts = [front.count(w) for w in takers]
        if max(counts) - min(counts) > 64 and max(counts) > 1.5 * min(counts):
            return front.count(worker)
        if max(request.cached(w) for w in takers) / request.size > 0.3:
            return -request.cached(worker)
        return self.trees.get(worker, 0)

    def picked(self, front: SlowFront, request: SlowRequest, worker: int) -> None:
        new_tokens = request.size - request.cached(worker)
        self.trees[worker] = self.trees.get(worker, 0) + new_tokens
