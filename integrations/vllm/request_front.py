"""The engine's client of one API server, as far as the routing of requests reads and uses it."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any
from weakref import ref

from equipoise.balancer.requests.policy import WorkerReport
from equipoise.integrations.vllm.request_policy import Ranks

ENGINE = "vllm.v1.engine"
AFFINITY = "vllm.v1.engine.core_client"


class Front:
    """A view of the client; it does not keep the client alive, as nothing of the engine's does.

    Args:
        client: the engine's `DPLBAsyncMPClient`.
        ranks: that it routes to.
    """

    def __init__(self, client: Any, ranks: Ranks) -> None:
        self._client = ref(client)
        self._ranks = ranks
        self._seen: object = client.lb_engines  # what stands there before the first report
        self.ranks = ranks

    @property
    def dead(self) -> bool:
        """Whether the engine has died or was shut down: its own errors reach every request."""
        client = self._client()
        return client is None or bool(client.resources.engine_dead)

    def reports(self) -> tuple[WorkerReport, ...]:
        """What the ranks said last, all of them; empty where that was read already.

        The coordinator sends a new list about every 100 ms while something changes.
        """
        client = self._client()
        if client is None or client.lb_engines is self._seen:
            return ()
        self._seen = client.lb_engines
        return tuple(self._report(*one) for one in client.lb_engines[: self._ranks.count])

    def _report(self, waiting: int, running: int, usage: float) -> WorkerReport:
        tokens = int(usage * (self._ranks.kv_tokens or 0))
        return WorkerReport(waiting=waiting, running=running, tokens=tokens, kv_usage=usage)

    def routes(self, request: Any) -> bool:
        """Whether a policy is to choose; else the engine's own rule does, at once.

        It does for what only releases memory elsewhere, for further parts of an input that it has
        begun with, and for ranks that do not exist, which it refuses.
        """
        client = self._client()
        begun = client is None or request.request_id in client.reqs_in_flight
        rank = request.data_parallel_rank
        there = rank is None or 0 <= rank < self._ranks.count
        return there and not begun and not request.abort_immediately

    def rank_of(self, request: Any) -> int | None:
        """The only rank that may serve it: one that was asked for, or that has what it needs."""
        if request.data_parallel_rank is not None:
            return int(request.data_parallel_rank)
        if request.pooling_params is None:
            return None
        index = import_module(AFFINITY).get_late_interaction_engine_index(
            request.pooling_params, self._ranks.count
        )
        return None if index is None else int(index)

    def end(self, requests: Iterable[str], reason: str) -> None:
        """Have requests that the engine never saw end as if it had ended them.

        Args:
            requests: their ids.
            reason: a name of the engine's `FinishReason`.
        """
        ids = list(requests)
        client = self._client()
        if client is None or not ids:
            return
        engine = import_module(ENGINE)
        outputs = [
            engine.EngineCoreOutput(one, [], finish_reason=engine.FinishReason[reason])
            for one in ids
        ]
        client.outputs_queue.put_nowait(
            engine.EngineCoreOutputs(
                engine_index=client.engine_ranks_managed[0], outputs=outputs, finished_requests=ids
            )
        )


def size_of(request: Any) -> int:
    """Prompt tokens, at least 1."""
    prompt: Sequence[Any] | None = request.prompt_token_ids
    if prompt is None:
        prompt = request.prompt_embeds
    return max(1, 0 if prompt is None else len(prompt))


def releases(request: Any) -> bool:
    """Whether memory elsewhere waits for this request to come, or to be given up, at an engine."""
    params = request.sampling_params
    extra = (None if params is None else params.extra_args) or {}
    return extra.get("kv_transfer_params") is not None
