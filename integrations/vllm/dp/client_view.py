"""What `dp_load_balancer` reads from, and does with, vLLM's client of one API server."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple
from weakref import ref

from equipoise.balancer.requests.policy import WorkerReport
from equipoise.balancer.requests.prefix_index import token_blocks
from equipoise.integrations.vllm.dp.policy import RankCapacity

ENGINE_MODULE = "vllm.v1.engine"
CORE_CLIENT_MODULE = "vllm.v1.engine.core_client"


class RankLoad(NamedTuple):
    """One client's load on a rank: number of requests, and their tokens."""

    requests: int
    tokens: int


RankLoads = Callable[[], Sequence[RankLoad]]
"""Returns loads by rank; called only if they are needed."""
NUM_COUNT_FIELDS = 2
"""Fields of a report before vLLM 0.32: waiting and running requests. Later ones have more."""


class ClientView:
    """A view of the client that does not keep it alive, like vLLM's own references.

    Args:
        client: vLLM's `DPLBAsyncMPClient`.
        ranks: capacity of the ranks that it routes to.
    """

    def __init__(self, client: Any, ranks: RankCapacity) -> None:
        self._client = ref(client)
        self._ranks = ranks
        self._last_reports: object = client.lb_engines  # the initial value, which is no report
        self.ranks = ranks

    @property
    def engine_dead(self) -> bool:
        """Whether the engine has died or was shut down; vLLM then fails every request itself."""
        client = self._client()
        return client is None or bool(client.resources.engine_dead)

    def new_reports(self, loads: RankLoads) -> tuple[WorkerReport, ...]:
        """Return the latest reports of all ranks; empty if they were read before.

        The coordinator sends a new list about every 100 ms while something changes. Before vLLM
        0.32 it has the number of requests of a rank, and not its KV cache usage: then requests are
        assumed to be as long as this client's own, from `loads`.
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
        """Whether the policy may choose a rank; else vLLM's own rule does, at once.

        The latter is so for requests that only release remote memory, for further parts of an input
        that was already sent, and for ranks that do not exist, which vLLM refuses.
        """
        client = self._client()
        already_sent = client is None or request.request_id in client.reqs_in_flight
        rank = request.data_parallel_rank
        rank_exists = rank is None or 0 <= rank < self._ranks.count
        return rank_exists and not already_sent and not request.abort_immediately

    def required_rank(self, request: Any) -> int | None:
        """Return the only rank that may serve a request: the one it names, or that has its
        state."""
        if request.data_parallel_rank is not None:
            return int(request.data_parallel_rank)
        if request.pooling_params is None:
            return None
        index = import_module(CORE_CLIENT_MODULE).get_late_interaction_engine_index(
            request.pooling_params, self._ranks.count
        )
        return None if index is None else int(index)

    def finish_requests(self, requests: Iterable[str], reason: str) -> None:
        """End requests that the engine never got, as if the engine had ended them.

        Args:
            requests: their ids.
            reason: name of a `FinishReason` of vLLM.
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
    """Replace the load of ranks without requests of this client by the client's total load."""
    total = RankLoad(*map(sum, zip(*loads, strict=True)))
    return [load if load.requests else total for load in loads]


def prompt_length(request: Any) -> int:
    """Return the number of prompt tokens, at least 1."""
    prompt: Sequence[Any] | None = request.prompt_token_ids
    if prompt is None:
        prompt = request.prompt_embeds
    return max(1, 0 if prompt is None else len(prompt))


def prompt_blocks(request: Any) -> tuple[int, ...]:
    """Hashes of the blocks of a prompt of token ids alone; none of another one.

    What vLLM's prefix cache tells apart: an adapter, and the salt of a request.
    """
    if not request.prompt_token_ids or request.prompt_embeds is not None or request.mm_features:
        return ()
    adapter = request.lora_request
    name = "" if adapter is None else adapter.lora_name
    return token_blocks(request.prompt_token_ids, f"{name}\0{request.cache_salt or ''}")


def releases_remote_kv(request: Any) -> bool:
    """Whether remote KV memory is held until an engine gets this request, or its abort."""
    params = request.sampling_params
    extra = (None if params is None else params.extra_args) or {}
    return extra.get("kv_transfer_params") is not None
