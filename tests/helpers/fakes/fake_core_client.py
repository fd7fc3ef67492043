"""vLLM's client of several engines, and the engines, as far as the routing of requests meets them.

Shaped like version 0.32 and, where it differs, 0.23: names, when books are kept, and when an engine
says that a request ended.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from helpers.fakes.manual_clock import LoopTurns

from equipoise.balancer.requests.dispatcher import RequestDispatcher
from equipoise.balancer.requests.policy import RoutingPolicy
from equipoise.balancer.requests.policy_server import PolicyServer
from equipoise.balancer.requests.remote_policy import RemotePolicy, connect_in_process
from equipoise.integrations.vllm.dp import core_client
from equipoise.integrations.vllm.dp.client_view import NUM_COUNT_FIELDS
from equipoise.integrations.vllm.dp.core_client import client_class
from equipoise.integrations.vllm.dp.scheduler import DpRequestScheduler, RunningLoopClock


class Release(Enum):
    """Of vLLM."""

    NEW = "0.32"
    OLD = "0.23"
    """Ranks do not report how full they are, and further parts of an input go anywhere."""


@dataclass
class FakeRequest:
    """What the engine's request has; `length`: tokens that it will make.

    One that is `resumable` does not end before a part of it comes that is not.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    length: int = 1
    data_parallel_rank: int | None = None
    prompt_embeds: object = None
    pooling_params: object = None
    sampling_params: Any = None
    resumable: bool = False
    abort_immediately: bool = False
    client_index: int = 0
    mm_features: object = None
    lora_request: Any = None
    cache_salt: str | None = None


def asked(
    name: str, size: int = 4, length: int = 2, rank: int | None = None, resumable: bool = False
) -> FakeRequest:
    return FakeRequest(name, [0] * size, length, rank, resumable=resumable)


@dataclass
class FakeEngine:
    """Admits up to `slots`, and makes a token of each in a step.

    Attributes:
        slots: requests that run at once.
        seen: messages in the order in which they came.
        reached: ids that abort messages named.
    """

    slots: int
    seen: list[FakeRequest] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    _here: dict[str, FakeRequest] = field(default_factory=dict)
    _token_counts: Counter[str] = field(default_factory=Counter)
    _open: set[str] = field(default_factory=set)
    _finished: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that wait, and that run."""
        return max(0, len(self._here) - self.slots), min(len(self._here), self.slots)

    @property
    def tokens(self) -> int:
        return sum(len(one.prompt_token_ids or ()) for one in self._here.values())

    def add(self, request: FakeRequest) -> None:
        self.seen.append(replace(request))
        self._here.setdefault(request.request_id, request)
        (self._open.add if request.resumable else self._open.discard)(request.request_id)
        if request.abort_immediately:
            self.abort([request.request_id])

    def abort(self, requests: Iterable[str]) -> None:
        for name in requests:
            self.reached.append(name)
            request = self._here.pop(name, None)
            if request is not None:
                self._finished[request.client_index].add(name)

    def step(self) -> dict[int, SimpleNamespace]:
        """By client, what the step brought it."""
        outputs: dict[int, list[SimpleNamespace]] = defaultdict(list)
        for name, request in list(self._here.items())[: self.slots]:
            if self._token_counts[name] < request.length:
                self._token_counts[name] += 1
                outputs[request.client_index].append(
                    SimpleNamespace(request_id=name, new_token_ids=[7])
                )
            if self._token_counts[name] >= request.length and name not in self._open:
                del self._here[name]
                self._finished[request.client_index].add(name)
        finished, self._finished = self._finished, defaultdict(set)
        return {
            client: SimpleNamespace(
                outputs=outputs.get(client, []), finished_requests=finished.get(client)
            )
            for client in {*outputs, *finished}
        }


def configuration(slots: int, **routing: Any) -> SimpleNamespace:
    """Of an engine that asks for routing, where there is any."""
    return SimpleNamespace(
        additional_config={"equipoise": {"dp_load_balancer": routing}} if routing else {},
        cache_config=SimpleNamespace(
            kv_cache_size_tokens=1000,
            num_gpu_blocks=None,
            block_size=16,
            enable_prefix_caching=True,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=slots, policy="fcfs"),
    )


class FakeCoreClient:
    """Of one API server; the class that `Routed` starts from."""

    release = Release.NEW
    address: str | None = "ipc:///tmp/statistics"
    equipoise_scheduler: DpRequestScheduler | None = None

    def __init__(
        self, config: Any, engines: list[FakeEngine], client_count: int = 1, client_index: int = 0
    ) -> None:
        self.vllm_config = config
        self.client_count, self.client_index = client_count, client_index
        self.engines = {bytes([number]): one for number, one in enumerate(engines)}
        self.core_engines = list(self.engines)
        self.engine_ranks_managed = list(range(len(engines)))
        self.lb_engines: list[list[Any]] = [[0, 0, 0.0] for _ in engines]
        self.reqs_in_flight: dict[str, bytes] = {}
        self.engine_inflight: Counter[bytes] = Counter()
        self.resources = SimpleNamespace(engine_dead=False)
        self.stats_update_address = self.address
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.paused: list[str] = []
        self.broken: set[str] = set()
        """Ids that cannot be sent."""

    @property
    def scheduler(self) -> DpRequestScheduler:
        return cast(DpRequestScheduler, self.equipoise_scheduler)

    async def add_request_async(self, request: FakeRequest) -> None:
        request.client_index = self.client_index
        engine = self.get_core_engine_for_request(request)
        if self.resources.engine_dead or request.request_id in self.broken:
            raise OSError("it does not take that")
        self.engines[engine].add(request)
        await asyncio.sleep(0)

    def get_core_engine_for_request(self, request: FakeRequest) -> bytes:
        assigned = self.reqs_in_flight.get(request.request_id)
        if assigned is not None and self.release is Release.NEW:
            return assigned
        if assigned is not None:
            self.engine_inflight[assigned] -= 1
        engine = min(self.core_engines, key=lambda one: self.engine_inflight[one])
        if request.data_parallel_rank is not None:
            engine = self.core_engines[request.data_parallel_rank]
        self.reqs_in_flight[request.request_id] = engine
        self.engine_inflight[engine] += 1
        return engine

    @staticmethod
    async def process_engine_outputs(client: "FakeCoreClient", outputs: Any) -> None:
        for name in outputs.finished_requests or ():
            if (engine := client.reqs_in_flight.pop(name, None)) is not None:
                client.engine_inflight[engine] -= 1

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for name in request_ids:
            if (engine := self.reqs_in_flight.get(name)) is not None:
                self.engines[engine].abort([name])

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        del clear_cache
        self.paused.append(mode)

    async def pause_generation_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        await FakeCoreClient.pause_scheduler_async(self, mode, clear_cache)

    async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
        del level
        self.paused.append(mode)


class Routed(FakeCoreClient):
    """With our part in it."""


class OldRouted(Routed):
    """The same, of 0.23."""

    release = Release.OLD


def patched(release: Release) -> type[Routed]:
    """The client that takes the place of this release's."""
    return client_class(Routed if release is Release.NEW else OldRouted)


@dataclass
class Deployment:
    """Engines and the clients of several API servers.

    Attributes:
        engines: of all clients.
        clients: one an API server.
        server: has the policy of several clients.
        clock: of that, too.
        ended: by id, how often a client was told that it ended.
    """

    engines: list[FakeEngine]
    clients: list[Routed] = field(default_factory=list)
    server: PolicyServer | None = None
    clock: LoopTurns = field(default_factory=LoopTurns)
    ended: Counter[str] = field(default_factory=Counter)

    @property
    def policy(self) -> RoutingPolicy | None:
        """Of all clients."""
        return self.clients[0].scheduler.policy if self.server is None else self.server.policy

    def share(
        self,
        client: Routed,
        policy: RemotePolicy,
        dispatcher: RequestDispatcher,
        make_policy: Callable[[], RoutingPolicy],
    ) -> None:
        """As `share_policy`, without a socket."""
        if client.client_index == 0:
            names = [str(rank) for rank in range(len(client.core_engines))]
            self.server = PolicyServer(make_policy(), names, self.clock, lambda error: None)
        assert self.server is not None
        session = connect_in_process(self.server, policy, dispatcher, RunningLoopClock())
        # Time passes here without turns, in which a client could say that it is there.
        session._look_timer.cancel()

    async def step(self, engine: int) -> None:
        """One engine makes a step, and everybody hears of it."""
        for client, outputs in self.engines[engine].step().items():
            self.ended.update(outputs.finished_requests or ())
            await self.clients[client].process_engine_outputs(self.clients[client], outputs)
        await turn()

    def report(self) -> None:
        """The coordinator publishes."""
        for client in self.clients:
            loads = [[*one.counts, min(1.0, one.tokens / 1000)] for one in self.engines]
            client.lb_engines = [
                one if client.release is Release.NEW else one[:NUM_COUNT_FIELDS] for one in loads
            ]

    async def run_out(self, most: int = 500) -> None:
        """Until no engine has anything, and nothing is held: hold times do not pass meanwhile."""
        for _ in range(most):
            for number in range(len(self.engines)):
                await self.step(number)
            self.report()
            for client in self.clients:
                client.scheduler.poll()
            await turn()
            if self.idle:
                return

    @property
    def idle(self) -> bool:
        waiting = any(sum(one.counts) for one in self.engines)
        return not waiting and not any(one.scheduler.requests for one in self.clients)


def deploy(
    slots: int,
    engines: int = 2,
    clients: int = 1,
    *,
    release: Release = Release.NEW,
    **routing: Mapping[str, Any] | Any,
) -> Deployment:
    """API servers in front of engines; without `routing` they have no schedulers."""
    kind = patched(release)
    fake_engines = [FakeEngine(slots) for _ in range(engines)]
    config = configuration(slots, **routing)
    deployment = Deployment(fake_engines)
    with patch.object(core_client, "share_policy", deployment.share):
        for index in range(clients):
            deployment.clients.append(kind(config, fake_engines, clients, index))
    return deployment


async def turn() -> None:
    """Everything that is due in the event loop has been done."""
    for _ in range(12):
        await asyncio.sleep(0)
