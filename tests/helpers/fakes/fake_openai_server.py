"""A server of the OpenAI API that makes up its tokens, and notes what it served.

A token says who made it and which one it is: `w0:17 `. As a process:
`python -m helpers.fakes.fake_openai_server JSON`, with the fields of `Fake`. What it serves is
noted in a file, a line an event, at once: it may be killed any time.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

NAME_OF_ID = "X-Request-Id"
GENERATING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/inference/v1/generate",
)
"""Paths that are answered by tokens; any other is echoed, but for POST below `NOWHERE`: 405."""
NOWHERE = "/nowhere"


@dataclass
class Fake:
    """One server.

    A request may carry `fake`, by the name of a server: what that one is to do, and not to answer.
    `status`: answer it; `silent`: never answer; `hang_up`: after so many tokens; `stall`: after so
    many tokens say nothing more; `shy`: no `[DONE]`; `raw`: stream these pieces of text instead;
    `whole`: answer this JSON, asked for a stream or not; `delay`: seconds before the first token.

    Attributes:
        name: in its tokens.
        slots: requests that it makes tokens for at once; others wait.
        pace: seconds a token.
        health: status that it answers when it is asked how it is; 0: it does not answer.
        metrics: what it tells Prometheus; None: it never answers.
        silent: paths without tokens that it never answers.
        record: file for what it serves; empty: it is kept in `served` only.
    """

    name: str
    port: int = 0
    slots: int = 64
    pace: float = 0.0
    record: str = ""
    served: list[dict[str, Any]] = field(default_factory=list)
    health: int = 200
    metrics: str | None = ""
    silent: tuple[str, ...] = ()

    def note(self, event: str, name: str, **more: object) -> None:
        entry = {"event": event, "id": name, "worker": self.name, **more}
        self.served.append(entry)
        if self.record:
            file = os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, (json.dumps(entry) + "\n").encode())
            os.close(file)

    def events(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.served if one["event"] == event]

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        self._free = asyncio.Semaphore(self.slots)
        for path in GENERATING:
            app.router.add_post(path, self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{tail:.*}", self._echo)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        del request
        if not self.health:
            await asyncio.Event().wait()
        return web.Response(status=self.health)

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        if self.metrics is None:
            await asyncio.Event().wait()
        return web.Response(text=self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def _echo(self, request: web.Request) -> web.Response:
        if request.method == "POST" and request.path.startswith(NOWHERE):
            raise web.HTTPMethodNotAllowed("POST", ["GET"])
        headers, size = dict(request.headers), len(await request.read())
        self.note("echo", "", path=request.path_qs, headers=headers, body=size)
        if request.path in self.silent:
            await asyncio.Event().wait()
        return web.json_response({"path": request.path_qs, "headers": dict(request.headers)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        parameters = json.loads(body)
        name = request.headers.get(NAME_OF_ID, "")
        behaviour = (parameters.get("fake") or {}).get(self.name, {})
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.note("begin", name, headers=headers, body=len(body))
        try:
            return await self._answer(request, parameters, behaviour, name)
        except asyncio.CancelledError:
            self.note("abort", name)
            raise

    async def _answer(
        self, request: web.Request, parameters: dict[str, Any], behaviour: dict[str, Any], name: str
    ) -> web.StreamResponse:
        if "status" in behaviour:
            error = {"message": "as told", "type": "fake", "param": None, "code": None}
            return web.json_response({"error": error}, status=behaviour["status"])
        if "silent" in behaviour:
            await asyncio.Event().wait()
        async with self._free:
            await asyncio.sleep(behaviour.get("delay", 0))
            if "whole" in behaviour:
                return web.json_response(behaviour["whole"])
            if parameters.get("stream"):
                return await self._stream(request, parameters, behaviour, name)
            return await self._whole(request, parameters, behaviour, name)

    async def _whole(
        self, request: web.Request, parameters: dict[str, Any], behaviour: dict[str, Any], name: str
    ) -> web.Response:
        count = parameters.get("max_tokens", 16)
        for _ in range(count):
            await asyncio.sleep(self.pace)
        if "hang_up" in behaviour:
            assert request.transport is not None
            request.transport.abort()
        text = "".join(f"{self.name}:{index} " for index in range(count))
        self.note("end", name, tokens=count)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "text": text}
        return web.json_response({"choices": [choice], "usage": _usage(parameters, count)})

    async def _stream(
        self, request: web.Request, parameters: dict[str, Any], behaviour: dict[str, Any], name: str
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        if "raw" in behaviour:
            for piece in behaviour["raw"]:
                await answer.write(piece.encode())
                await asyncio.sleep(self.pace)
            return answer
        await answer.write(_event({"delta": {"role": "assistant", "content": ""}}))
        count = parameters.get("max_tokens", 16)
        for index in range(count):
            await asyncio.sleep(self.pace)
            if behaviour.get("hang_up") == index:
                assert request.transport is not None
                request.transport.abort()
            if behaviour.get("stall") == index:
                await asyncio.Event().wait()
            self.note("token", name, index=index)
            await answer.write(_event({"delta": {"content": f"{self.name}:{index} "}}))
        await answer.write(_event({"delta": {}, "finish_reason": "stop"}))
        if (parameters.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": _usage(parameters, count)}
            await answer.write(f"data: {json.dumps(usage)}\n\n".encode())
        if "shy" not in behaviour:
            await answer.write(b"data: [DONE]\n\n")
        self.note("end", name, tokens=count)
        return answer


def _usage(parameters: dict[str, Any], count: int) -> dict[str, int]:
    prompt = parameters.get("prompt_tokens", 7)
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _event(choice: dict[str, Any]) -> bytes:
    whole = {"index": 0, "finish_reason": None} | choice
    return f"data: {json.dumps({'choices': [whole]})}\n\n".encode()


async def start(fake: Fake) -> web.AppRunner:
    """Serve on the loopback address; sets `fake.port`."""
    runner = web.AppRunner(
        fake.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    setup = web.TCPSite(runner, "127.0.0.1", fake.port, backlog=1024)
    await setup.start()
    fake.port = setup.port
    return runner


async def _serve(fake: Fake, say: Callable[[int], None]) -> None:
    await start(fake)
    say(fake.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Fake(**json.loads(sys.argv[1])), lambda port: print(port, flush=True)))
