"""In place of Ray Serve: what a request router gets from it, and replicas that obey a test.

Names, signatures and the order of calls are those of Ray 2.60, which `tests/engines/ray` starts.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

ROUTER = "equipoise.integrations.ray.router"


@dataclass
class PendingRequest:
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    metadata: Any
    created_at: float = field(default_factory=time.time)


@dataclass
class RunningReplica:
    replica_id: str
    max_ongoing_requests: int = 2
    routing_stats: dict[str, Any] = field(default_factory=dict)
    is_cross_language: bool = False


class RequestRouter:
    """Routes each request to the first replica, and notes that it did."""

    def __init__(self, strict: bool = True) -> None:
        self._deployment_id = SimpleNamespace(name="llm", app_name="app")
        self._use_replica_queue_len_cache = strict
        self._replicas: dict[str, RunningReplica] = {}
        self.queue_wait_time_ms_histogram = SimpleNamespace(observe=lambda milliseconds: None)
        self.backoffs: list[int] = []

    def initialize_state(self, **kwargs: Any) -> None: ...

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._replicas = {one.replica_id: one for one in replicas}

    def on_replica_actor_died(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: str, result: object
    ) -> None: ...

    def on_request_completed(self, replica_id: str, internal_request_id: str) -> None: ...

    async def _backoff(self, attempt: int) -> None:
        self.backoffs.append(attempt)
        await asyncio.sleep(0)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        while not self._replicas:
            await asyncio.sleep(0)
        return next(iter(self._replicas.values()))


class RequestRouterConfig(SimpleNamespace):
    """Takes any argument, as Ray's does, and has only fields that Ray knows."""

    model_fields = dict.fromkeys(
        ("request_router_class", "request_router_kwargs", "request_routing_stats_period_s")
    )


class Counter:
    def __init__(self, name: str, description: str = "", tag_keys: Sequence[str] = ()) -> None:
        self.tag_keys = tag_keys

    def set_default_tags(self, tags: Mapping[str, str]) -> "Counter":
        assert set(tags) <= set(self.tag_keys)
        return self

    def inc(self, value: float = 1, tags: Mapping[str, str] | None = None) -> None:
        assert set(tags or ()) <= set(self.tag_keys)


@contextmanager
def fake_ray() -> Iterator[Any]:
    """The router's module, imported over the fakes; what was imported before comes back."""
    contents: dict[str, dict[str, object]] = {
        "ray": {},
        "ray.serve": {},
        "ray.serve._private": {},
        "ray.serve._private.request_router": {},
        "ray.serve._private.request_router.pow_2_router": {
            "PowerOfTwoChoicesRequestRouter": type("PowerOfTwo", (RequestRouter,), {})
        },
        "ray.serve.request_router": {
            "RequestRouter": RequestRouter,
            "RunningReplica": type(
                "RunningReplica",
                (),
                dict.fromkeys(
                    ("max_ongoing_requests", "routing_stats", "replica_id", "is_cross_language")
                ),
            ),
        },
        "ray.serve.config": {"RequestRouterConfig": RequestRouterConfig},
        "ray.util": {"metrics": SimpleNamespace(Counter=Counter)},
    }
    before = {name: sys.modules.pop(name, None) for name in (*contents, ROUTER)}
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield import_module(ROUTER)
    finally:
        for name, old in before.items():
            sys.modules.pop(name, None)
            if old is not None:
                sys.modules[name] = old


class ActorDied(Exception):
    """What Ray raises where a replica died."""


@dataclass(eq=False)
class SentRequest:
    """A request that was sent to a replica.

    Attributes:
        reply: whether the replica accepts it.
        result: the answer.
        reported: whether the router was told that it is over.
    """

    replica_id: str
    call: str
    reply: asyncio.Future[bool]
    result: asyncio.Future[str]
    reported: bool = False

    @property
    def begun(self) -> bool:
        reply = self.reply
        answered = reply.done() and not reply.cancelled()
        return answered and reply.exception() is None and reply.result()


class FakeCluster:
    """Sends what a router chooses, as Ray's `AsyncioRouter` does; a test says what replicas do.

    Attributes:
        open: sendings that are not over.
    """

    def __init__(self, router: Any) -> None:
        self.router = router
        self.open: list[SentRequest] = []
        self._names = count()

    def call(self, *args: Any, call: str | None = None, model: str = "") -> asyncio.Task[str]:
        """A caller's request; the task is its answer."""
        name = f"call-{next(self._names)}" if call is None else call
        metadata = SimpleNamespace(internal_request_id=name, multiplexed_model_id=model)
        return asyncio.create_task(self._serve(PendingRequest(list(args), {}, metadata)))

    async def _serve(self, pending: PendingRequest) -> str:
        is_retry = False
        while True:
            replica = await self.router._choose_replica_for_request(pending, is_retry=is_retry)
            loop = asyncio.get_running_loop()
            call = pending.metadata.internal_request_id
            sent_request = SentRequest(
                replica.replica_id, call, loop.create_future(), loop.create_future()
            )
            self.open.append(sent_request)
            try:
                if not self.router._use_replica_queue_len_cache:
                    return await sent_request.result
                if await sent_request.reply:
                    self.router.on_request_routed(pending, sent_request.replica_id, sent_request)
                    return await sent_request.result
                self.end(sent_request)
            except ActorDied:
                self.router.on_replica_actor_died(sent_request.replica_id)
                if sent_request.begun:
                    raise
            except asyncio.CancelledError:
                self.end(sent_request)
                raise
            is_retry = True

    def accept(self, sent_request: SentRequest) -> None:
        if not sent_request.reply.done():
            sent_request.reply.set_result(True)

    def reject(self, sent_request: SentRequest, *, overtake: bool = False) -> None:
        """The word that the sent_request is over may come first."""
        if sent_request.reply.done():
            return
        if overtake:
            self.end(sent_request)
        sent_request.reply.set_result(False)

    def finish(self, sent_request: SentRequest) -> None:
        """Answer, though perhaps nobody has noticed yet that it was accepted."""
        self.accept(sent_request)
        if not sent_request.begun:
            return
        self.end(sent_request)
        if not sent_request.result.done():
            sent_request.result.set_result(sent_request.replica_id)

    def finish_all(self) -> None:
        """Answer everything that is sent now."""
        for sent_request in list(self.open):
            self.finish(sent_request)

    def kill(self, replica_id: str) -> None:
        """Everything that was sent there fails."""
        for sent_request in [one for one in self.open if one.replica_id == replica_id]:
            self.end(sent_request)
            waited_for = sent_request.result if sent_request.begun else sent_request.reply
            if not waited_for.done():
                waited_for.set_exception(ActorDied(replica_id))
        self.router.on_replica_actor_died(replica_id)

    def end(self, sent_request: SentRequest) -> None:
        """Tell the router once, in a turn of its own, as the callback of another thread does."""
        if not sent_request.reported:
            sent_request.reported = True
            self.open.remove(sent_request)
            asyncio.get_running_loop().call_soon(
                self.router.on_request_completed, sent_request.replica_id, sent_request.call
            )
