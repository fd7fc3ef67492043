"""Lower bound of the makespan of a workload, and the best assignment of tiny cases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.workload import Workload
from equipoise.hal.errors import UsageError

MAX_REQUESTS = 8
"""Upper limit of the exhaustive search: there are (workers * starts) ** requests assignments."""


def makespan_bound(workload: Workload, cluster: Cluster) -> float:
    """Returns the seconds that serving `workload` takes at least, under any policy.

    T >= fixed * K + (per_token + per_mean) * A / G, where K = max(max n, ceil(sum n / (G B))) steps
    are needed for requests of n = ceil(o / (1 + drafts)) steps each, and A KV tokens are read, the
    sum of n s + n (n - 1) / 2: s at the first step of a request, at least one more at each later
    step. Dividing A by G is a bound although requests cannot migrate: the largest work of a step is
    never below the mean. If workers compute prompts, the step that ends a prompt reads none of it,
    so one step of each request is not in A. If the KV cache is bounded too, A is 0, since a
    preempted request makes a token each time it is computed again.

    Not a bound for runs in which requests fail. Raises UsageError with noise, which can make any
    step short.
    """
    step = cluster.step
    if step.noise > 0:
        raise UsageError("no bound holds where the time of steps is noisy")
    drafts = 0 if cluster.drafting is None else cluster.drafting.tokens
    steps = -(-workload.outputs // (1 + drafts))
    steps_needed = max(int(steps.max()), -(-int(steps.sum()) // cluster.total_slots))
    tokens_read = _tokens_read(workload.prompts, steps, cluster) / cluster.workers
    return step.fixed * steps_needed + (step.per_token + step.per_mean) * tokens_read


def _tokens_read(prompts: np.ndarray, steps: np.ndarray, cluster: Cluster) -> int:
    if cluster.prefill is None:
        return int((prompts * steps + steps * (steps - 1) // 2).sum())
    if cluster.kv_tokens is not None:
        return 0
    return int((prompts * (steps - 1) + steps * (steps - 1) // 2).sum())


@dataclass(frozen=True)
class BestAssignment:
    """Where and when each request is served.

    Attributes:
        workers: worker of each request.
        starts: step at which each request begins.
        imbalance: sum over steps of G * largest - sum of the loads, KV tokens.
    """

    workers: tuple[int, ...]
    starts: tuple[int, ...]
    imbalance: int


def best_assignment(
    workload: Workload, workers: int, slots: int, latest: int | None = None
) -> BestAssignment:
    """Finds the assignment with the least imbalance over all steps, by exhaustive search.

    All requests are present from the beginning. Each takes one of its worker's `slots` from its
    start on, reads s + j tokens at its j-th step, j = 0 to o - 1, and does not move. `latest` is
    the last step at which a request may begin; None allows any that can help, up to serving all
    requests one after another; 0 chooses only workers.

    Raises UsageError for more than `MAX_REQUESTS` requests, and if no assignment fits.
    """
    if workload.count > MAX_REQUESTS:
        raise UsageError(f"the best of {workload.count} requests is not looked for: too many")
    outputs = [int(output) for output in workload.outputs]
    if latest is None:
        latest = sum(outputs) - min(outputs)
    search = _Search([int(prompt) for prompt in workload.prompts], outputs, workers, slots, latest)
    best = search.best()
    if best is None:
        raise UsageError(f"{workload.count} requests do not fit at once: let some begin later")
    return best


class _Search:
    """Branch and bound, depth first, requests with most tokens to read first."""

    def __init__(
        self, prompts: Sequence[int], outputs: Sequence[int], workers: int, slots: int, latest: int
    ) -> None:
        self._prompts, self._outputs = prompts, outputs
        self._workers, self._slots, self._latest = workers, slots, latest
        span = latest + max(outputs)
        self._loads = np.zeros((workers, span), dtype=np.int64)
        self._counts = np.zeros((workers, span), dtype=np.int64)
        self._total_tokens_read = sum(
            o * s + o * (o - 1) // 2 for s, o in zip(prompts, outputs, strict=True)
        )
        self._order = sorted(range(len(prompts)), key=lambda i: -outputs[i] * prompts[i])
        self._places: dict[int, tuple[int, int]] = {}
        self._least: int | None = None
        self._best: dict[int, tuple[int, int]] = {}

    def best(self) -> BestAssignment | None:
        self._descend(0)
        if self._least is None:
            return None
        places = [self._best[i] for i in range(len(self._prompts))]
        workers, starts = zip(*places, strict=True)
        return BestAssignment(
            workers, starts, self._workers * self._least - self._total_tokens_read
        )

    def _descend(self, depth: int) -> None:
        # The sum of the fullest workers never falls as requests are added, and the tokens read are
        # the same for every assignment: a branch that is no better already can be cut.
        envelope = int(self._loads.max(axis=0).sum())
        if self._least is not None and envelope >= self._least:
            return
        if depth == len(self._order):
            self._least, self._best = envelope, dict(self._places)
            return
        request = self._order[depth]
        output = self._outputs[request]
        tokens_by_step = self._prompts[request] + np.arange(output)
        for worker, start in self._candidates():
            steps = slice(start, start + output)
            if (self._counts[worker, steps] >= self._slots).any():
                continue
            self._loads[worker, steps] += tokens_by_step
            self._counts[worker, steps] += 1
            self._places[request] = worker, start
            self._descend(depth + 1)
            self._loads[worker, steps] -= tokens_by_step
            self._counts[worker, steps] -= 1

    def _candidates(self) -> Iterator[tuple[int, int]]:
        """Yields workers and starts; of the unused workers only one, since all are alike."""
        used = {worker for worker, _ in self._places.values()}
        fresh = next((w for w in range(self._workers) if w not in used), None)
        for worker in sorted(used | ({fresh} if fresh is not None else set())):
            for start in range(self._latest + 1):
                yield worker, start
