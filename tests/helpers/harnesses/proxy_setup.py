"""A proxy over made-up servers, within one event loop, and a client for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
from helpers.fakes.fake_openai_server import Fake, start
from helpers.fakes.late_binding_policy import LateBinding

from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.proxy import Proxy
from equipoise.serve.settings import AccessSettings, HealthSettings, RouteSettings, WorkerSettings

T = TypeVar("T")
PATIENCE = 200.0
CHAT = "/v1/chat/completions"
QUICK = HealthSettings(interval=0.1, timeout=30.0)


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])

    @property
    def text(self) -> str:
        return str(json.loads(self.body)["choices"][0]["message"]["content"])


@dataclass
class ProxySetup:
    """A proxy, its servers, its policy, and a client."""

    proxy: Proxy
    policy: LateBinding
    fakes: list[Fake]
    client: aiohttp.ClientSession
    url: str

    async def post(self, content: object, path: str = CHAT, **headers: str) -> Answer:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(self.url + path, data=body, headers=header_fields) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def get(self, path: str, **headers: str) -> Answer:
        async with self.client.get(self.url + path, headers=headers) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def metric(self, name: str) -> float:
        text = (await self.get("/metrics")).body.decode()
        [line] = [one for one in text.splitlines() if one.startswith(f"equipoise_route_{name} ")]
        return float(line.split()[-1])

    async def until(self, holds: Any) -> None:
        """Wait until it does."""
        async with asyncio.timeout(PATIENCE):
            while not holds():
                await asyncio.sleep(0.01)


def chat_request(tokens: int = 4, **more: object) -> dict[str, Any]:
    message = {"role": "user", "content": "What is even?"}
    return {"model": "fake", "messages": [message], "max_tokens": tokens, **more}


def tokens_of(body: bytes) -> list[str]:
    """Tokens among the events of a stream."""
    tokens = []
    for line in body.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                tokens += [choice.get("delta", {}).get("content") or ""]
    return [one for one in tokens if one]


def error_of(body: bytes) -> dict[str, Any] | None:
    """The error with which a stream ends, if there is one."""
    for line in body.decode().splitlines():
        if line.startswith('data: {"error"'):
            return dict(json.loads(line[6:])["error"])
    return None


def settings_of(fakes: list[Fake], **fields: Any) -> RouteSettings:
    workers = tuple(
        WorkerSettings(url=f"http://127.0.0.1:{one.port}", name=one.name, slots=one.slots)
        for one in fakes
    )
    fields.setdefault("health", QUICK)
    fields.setdefault("workers", workers)
    fields["access"] = replace(fields.get("access", AccessSettings()), port=0)
    return RouteSettings(**fields)


@asynccontextmanager
async def proxied(*fakes: Fake, **fields: Any) -> AsyncIterator[ProxySetup]:
    """Everything started, and ended behind it."""
    async with AsyncExitStack() as stack:
        for fake in fakes:
            runner = await start(fake)
            stack.push_async_callback(runner.cleanup)
        settings = settings_of(list(fakes), **fields)
        policy = LateBinding([one.slots for one in settings.workers])
        proxy = Proxy(settings, policy)
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        scheme = "http" if settings.access.certificate is None else "https"
        setup = ProxySetup(proxy, policy, list(fakes), client, f"{scheme}://127.0.0.1:{proxy.port}")
        await setup.until(
            lambda: all(one.state is WorkerState.SERVING for one in proxy.dispatcher.workers)
        )
        yield setup
        assert policy.refused == []
        assert proxy.dispatcher.policy_errors == 0


def run(work: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own; bounded."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE):
            return await work

    return asyncio.run(bounded())
