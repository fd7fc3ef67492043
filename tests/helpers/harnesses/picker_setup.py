"""A picker over made-up servers behind a made-up Envoy, within one event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
from helpers.fakes.fake_envoy import BodyModes, EnvoyAnswer, FakeEnvoy, fake_envoy
from helpers.fakes.fake_openai_server import Fake, start
from helpers.harnesses.proxy_setup import PATIENCE, QUICK

from equipoise.balancer.requests.policy import WorkerState
from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.serve.picker.endpoint_pool import EndpointPool
from equipoise.serve.picker.server import Picker
from equipoise.serve.picker.settings import (
    PickerLimits,
    PickerPorts,
    PickerSettings,
    PickerTimeouts,
    StaticEndpoints,
    TokenSource,
)
from equipoise.serve.settings import WorkerSettings

T = TypeVar("T")
ANY_PORT = PickerPorts(grpc=0, health=0, http=0)


def worker_of(fake: Fake, **fields: Any) -> WorkerSettings:
    """The endpoint that a server is."""
    url = f"http://127.0.0.1:{fake.port}"
    return replace(WorkerSettings(url=url, name=fake.name, slots=fake.slots), **fields)


def endpoint_at(address: str, **fields: Any) -> WorkerSettings:
    """An endpoint that nothing is sent to."""
    return WorkerSettings(url=f"http://{address}", name=address, **fields)


def pool_of(
    *addresses: str,
    slots: int = 2,
    tokens: TokenSource = TokenSource.CHUNKS,
    lockstep: bool = False,
    **timeouts: float,
) -> EndpointPool:
    """A pool without a picker, whose endpoints all serve."""
    settings = PickerSettings(
        endpoints=StaticEndpoints(workers=()),
        limits=PickerLimits(queued=5),
        timeouts=PickerTimeouts(**timeouts),
        tokens=tokens,
    )
    pool = EndpointPool(routing_policy_factory("fit", {"lockstep": lockstep}), settings)
    set_endpoints(pool, [endpoint_at(one, slots=slots) for one in addresses])
    return pool


def set_endpoints(pool: EndpointPool, endpoints: Sequence[WorkerSettings]) -> None:
    """List them, and find all of them well."""
    pool.set_endpoints(endpoints)
    for one in pool.endpoints:
        pool.dispatcher.set_health(one.number, WorkerState.SERVING)


def prompt(tokens: int = 4, **more: object) -> bytes:
    """The body of a streamed request."""
    content = {"model": "m", "prompt": "What is even?", "max_tokens": tokens, "stream": True}
    return json.dumps(content | more).encode()


@dataclass
class PickerSetup:
    """A picker, the servers, and Envoy in front of it."""

    picker: Picker
    fakes: list[Fake]
    runners: Mapping[str, Any]
    envoy: FakeEnvoy

    @property
    def pool(self) -> Any:
        return self.picker.pool

    def address(self, name: str) -> str:
        [port] = [one.port for one in self.fakes if one.name == name]
        return f"127.0.0.1:{port}"

    def send(self, body: bytes = b"", **more: Any) -> "asyncio.Task[EnvoyAnswer]":
        return asyncio.create_task(self.envoy.send(body or prompt(), **more))

    def state_of(self, name: str) -> WorkerState | None:
        """None: it is no endpoint."""
        for one in self.picker.pool.endpoints:
            if one.settings.name == name:
                return self.picker.pool.view(one).state
        return None

    async def page(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.picker.ports['http']}{path}"
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            return answer.status, await answer.text()

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until it does."""
        async with asyncio.timeout(PATIENCE):
            while not holds():
                await asyncio.sleep(0.005)

    @property
    def at_rest(self) -> bool:
        """Whether no request is left anywhere."""
        dispatcher = self.picker.pool.dispatcher
        return (
            not self.picker.in_flight
            and not self.picker.bodies.buffered_bytes
            and not dispatcher.requests
            and not dispatcher.queued
            and all(not view.load and not view.requests for view in dispatcher.workers)
        )


@asynccontextmanager
async def picking(
    *fakes: Fake,
    modes: BodyModes | None = None,
    factory: PolicyFactory | None = None,
    says_served: bool = True,
    workers: Callable[[Fake], WorkerSettings] = worker_of,
    **fields: Any,
) -> AsyncIterator[PickerSetup]:
    """Everything started, and ended behind it; the books are empty then."""
    async with AsyncExitStack() as stack:
        runners = {}
        for fake in fakes:
            runners[fake.name] = await start(fake)
            stack.push_async_callback(runners[fake.name].cleanup)
        fields.setdefault("health", QUICK)
        fields.setdefault("endpoints", StaticEndpoints(workers=tuple(map(workers, fakes))))
        fields.setdefault("ports", ANY_PORT)
        settings = PickerSettings(**fields)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        policy = factory or routing_policy_factory("fit", {"lockstep": False})
        picker = Picker(settings, policy, tasks)
        stack.push_async_callback(picker.close)
        await picker.start()
        certificate = settings.ports.certificate
        trusted = None if certificate is None else certificate.read_bytes()
        envoy = await stack.enter_async_context(
            fake_envoy(picker.ports["grpc"], modes or BodyModes(), says_served, trusted)
        )
        setup = PickerSetup(picker, list(fakes), runners, envoy)
        await setup.until(lambda: picker.pool.serving == len(picker.pool.endpoints))
        yield setup
        await setup.until(lambda: setup.at_rest)
        assert picker.pool.dispatcher.policy_errors == 0


def run(work: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own; bounded."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE):
            return await work

    return asyncio.run(bounded())
