"""The engine's client of one API server, as far as the routing of requests reads and uses it."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any
from weakref import ref

from equipoise.balancer.requests.policy import WorkerReport
from equipoise.integrations.vllm.dp.policy import RankCapacity
from equipoise.integrations.vllm.dp.request_table import RankLoad

ENGINE_MODULE = "vllm.v1.engine"
CORE_CLIENT_MODULE = "vllm.v1.engine.core_client"

RankLoads = Callable[[], Sequence[RankLoad]]
"""By rank; asked for only where it is needed."""
NUM_COUNT_FIELDS = 2
"""Of a report: requests that wait, and that run; what comes behind them is new in vLLM 0.32."""


class ClientView:
    """A view of the client; it does not keep the client alive, as nothing of the engine's does.

    Args:
        client: the engine's `DPLBAsyncMPClient`.
        ranks: that it routes to.
    """

    def __init__(self, client: Any, ranks: RankCapacity) -> None:
        self._client = ref(client)
        self._ranks = ranks
        self._last_reports: object = client.lb_engines  # what stands there before the first report
        self.ranks = ranks

    @property
    def engine_dead(self) -> bool:
        """Whether the engine has died or was shut down: its own errors reach every request."""
        client = self._client()
        return client is None or bool(client.resources.engine_dead)

    def new_reports(self, loads: RankLoads) -> tuple[WorkerReport, ...]:
        """What the ranks said last, all of them; empty where that was read already.

        The coordinator sends a new list about every 100 ms while something changes. Before vLLM
        0.32 it says how many requests a rank has, and not how full it is: they are taken to be as
        long there as this client's own are, which `loads` tells.
        """
        client = self._client()
        if client is None or client.lb_engines is self._last_reports:
            return ()
        self._last_reports = client.lb_engines
        reports = client.lb_engines[: self._ranks.count]
        if all(len(item) > NUM_COUNT_FIELDS for item in reports):
            return tuple(self._report(*item) for item in reports)
        return tuple(map(self._estimated_report, reports, _loads_or_total(loads())))

    def _report(self, waiting: int, running: int, usage: float) -> WorkerReport:
        tokens = int(usage * (self._ranks.kv_cache_tokens or 0))
        return WorkerReport(waiting=waiting, running=running, tokens=tokens, kv_usage=usage)

    def _estimated_report(self, counts: Sequence[int], load: RankLoad) -> WorkerReport:
        waiting, running = counts
        tokens = (waiting + running) * load.tokens // max(1, load.requests)
        usage = (
            min(1.0, tokens / self._ranks.kv_cache_tokens) if self._ranks.kv_cache_tokens else 0.0
        )
        return WorkerReport(waiting=waiting, running=running, tokens=tokens, kv_usage=usage)

    def policy_may_route(self, request: Any) -> bool:
        """Whether a policy is to choose; else the engine's own rule does, at once.

        It does for what only releases memory elsewhere, for further parts of an input that it has
        begun with, and for ranks that do not exist, which it refuses.
        """
        client = self._client()
        already_sent = client is None or request.request_id in client.reqs_in_flight
        rank = request.data_parallel_rank
        rank_exists = rank is None or 0 <= rank < self._ranks.count
        return rank_exists and not already_sent and not request.abort_immediately

    def required_rank(self, request: Any) -> int | None:
        """The only rank that may serve it: one that was asked for, or that has what it needs."""
        if request.data_parallel_rank is not None:
            return int(request.data_parallel_rank)
        if request.pooling_params is None:
            return None
        index = import_module(CORE_CLIENT_MODULE).get_late_interaction_engine_index(
            request.pooling_params, self._ranks.count
        )
        return None if index is None else int(index)

    def finish_requests(self, requests: Iterable[str], reason: str) -> None:
        """Have requests that the engine never saw end as if it had ended them.

        Args:
            requests: their ids.
            reason: a name of the engine's `FinishReason`.
        """
        ids = list(requests)
        client = self._client()
        if client is None or not ids:
            return
        engine = import_module(ENGINE_MODULE)
        outputs = [
            engine.EngineCoreOutput(item, [], finish_reason=engine.FinishReason[reason])
            for item in ids
        ]
        client.outputs_queue.put_nowait(
            engine.EngineCoreOutputs(
                engine_index=client.engine_ranks_managed[0], outputs=outputs, finished_requests=ids
            )
        )


def _loads_or_total(loads: Sequence[RankLoad]) -> list[RankLoad]:
    """For a rank that has none of this client's requests, those that the client has anywhere."""
    total = RankLoad(*map(sum, zip(*loads, strict=True)))
    return [load if load.requests else total for load in loads]


def prompt_length(request: Any) -> int:
    """Prompt tokens, at least 1."""
    prompt: Sequence[Any] | None = request.prompt_token_ids
    if prompt is None:
        prompt = request.prompt_embeds
    return max(1, 0 if prompt is None else len(prompt))


def releases_remote_kv(request: Any) -> bool:
    """Whether memory elsewhere waits for this request to come, or to be given up, at an engine."""
    params = request.sampling_params
    extra = (None if params is None else params.extra_args) or {}
    return extra.get("kv_transfer_params") is not None
