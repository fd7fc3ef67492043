"""Requests of a made-up Envoy to an endpoint picker, and made-up workers that can be killed.

Workers answer `GET /health` and `GET /metrics` over HTTP; tokens are made within this process,
so that it costs the same whatever is measured. A worker sends the head of an answer with its first
token.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

import grpc
from aiohttp import web
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
KEY = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
TOKEN = b'data: {"choices": [{"index": 0, "text": " token", "finish_reason": null}]}\n\n'
DONE = b"data: [DONE]\n\n"
HEADERS = {
    ":method": "POST",
    ":path": "/v1/completions",
    ":scheme": "http",
    ":authority": "workers",
    "user-agent": "client/1.0",
    "accept": "*/*",
    "content-type": "application/json",
    "x-forwarded-proto": "http",
    "x-request-id": "0b4f6d1e-5b7c-4d59-9d1b-2f4c8a1f6b0e",
}


@unique
class Answers(Enum):
    """Which bodies Envoy sends to the picker."""

    ENDS = "BUFFERED", "NONE"
    CHUNKS = "FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"


class WorkerDied(Exception):
    """The worker of a request is gone."""


@dataclass(eq=False)
class MadeUpWorker:
    """One endpoint.

    Attributes:
        slots: requests that it makes tokens for at once.
        pace: seconds a token.
        most_running: the most requests that it has had at once, waiting ones included.
    """

    slots: int
    pace: float
    port: int = 0
    alive: bool = True
    running: int = 0
    waiting: int = 0
    generated: int = 0
    most_running: int = 0
    died: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        """IP:PORT."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Answer health checks."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]
        self._free = asyncio.Semaphore(self.slots)

    async def kill(self) -> None:
        """Every connection breaks."""
        self.alive = False
        self.died.set()
        assert self.runner is not None
        await self.runner.cleanup()

    async def token(self) -> None:
        """Wait for one. Raises WorkerDied."""
        await asyncio.sleep(self.pace)
        if not self.alive:
            raise WorkerDied
        self.generated += 1

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _request: web.Request) -> web.Response:
        lines = {"w": self.waiting, "r": self.running, "t": 0, "generated": self.generated}
        return web.Response(text="".join(f"{key} {value}\n" for key, value in lines.items()))


@dataclass
class Load:
    """Requests to one picker.

    Attributes:
        workers: by address.
        outcomes: how many requests ended how.
    """

    channel: grpc.aio.Channel
    answers: Answers
    workers: dict[str, MadeUpWorker]
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._process = self.channel.stream_stream(
            PATH,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        request, response = map(ProcessingMode.BodySendMode.Value, self.answers.value)
        self._config = pb.ProtocolConfiguration(
            request_body_mode=request, response_body_mode=response
        )

    async def send(self, body: bytes, tokens: int) -> None:
        """One request, counted by its outcome."""
        call = self._process()
        endpoints = await self._destination(call, body)
        if endpoints is None:
            self.outcomes["refused by the picker"] += 1
            return
        for address in endpoints:
            worker = self.workers.get(address)
            if worker is not None and worker.alive and await self._answer(call, worker, tokens):
                break
        else:
            self.outcomes["lost without a token"] += 1
        # After the worker has freed the slot: the picker takes the end of the stream for that.
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    async def _destination(self, call: Any, body: bytes) -> list[str] | None:
        headers = HEADERS | {"content-length": str(len(body))}
        head = pb.ProcessingRequest(
            request_headers=pb.HttpHeaders(headers=_map(headers)), protocol_config=self._config
        )
        whole = pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))
        await call.write(head)
        if self.answers is Answers.CHUNKS:
            await call.write(whole)
            reply = await call.read()
            kind = reply.request_headers
        else:
            await call.read()
            await call.write(whole)
            reply = await call.read()
            kind = reply.request_body
        if reply.HasField("immediate_response"):
            return None
        if self.answers is Answers.CHUNKS:
            await call.read()
        for one in kind.response.header_mutation.set_headers:
            if one.header.key == KEY:
                return str(one.header.raw_value.decode()).split(",")
        raise AssertionError(f"no endpoint in {reply}")

    async def _answer(self, call: Any, worker: MadeUpWorker, tokens: int) -> bool:
        """False: it died before its first token, and the next one may be tried."""
        worker.waiting += 1
        worker.most_running = max(worker.most_running, worker.waiting + worker.running)
        try:
            async with worker._free:
                worker.waiting, worker.running = worker.waiting - 1, worker.running + 1
                try:
                    return await self._stream(call, worker, tokens)
                finally:
                    worker.running -= 1
        except WorkerDied:
            return False

    async def _stream(self, call: Any, worker: MadeUpWorker, tokens: int) -> bool:
        await worker.token()
        metadata = Metadata()
        metadata.filter_metadata["envoy.lb"].update({SERVED: worker.address})
        head = _map({":status": "200", "content-type": "text/event-stream"})
        await call.write(
            pb.ProcessingRequest(
                response_headers=pb.HttpHeaders(headers=head), metadata_context=metadata
            )
        )
        await call.read()
        try:
            await self._chunk(call, TOKEN, False, metadata)
            for _ in range(1, tokens):
                await worker.token()
                await self._chunk(call, TOKEN, False, metadata)
            await self._chunk(call, DONE, True, metadata)
        except WorkerDied:
            self.outcomes["broken off after a token"] += 1
        else:
            self.outcomes["complete"] += 1
        return True

    async def _chunk(self, call: Any, chunk: bytes, ends: bool, metadata: Metadata) -> None:
        if self.answers is Answers.ENDS:
            return
        body = pb.HttpBody(body=chunk, end_of_stream=ends)
        await call.write(pb.ProcessingRequest(response_body=body, metadata_context=metadata))
        reply = await call.read()
        passed_on = reply.response_body.response.body_mutation.streamed_response
        assert (passed_on.body, passed_on.end_of_stream) == (chunk, ends)


def _map(headers: dict[str, str]) -> HeaderMap:
    return HeaderMap(
        headers=[HeaderValue(key=key, raw_value=text.encode()) for key, text in headers.items()]
    )
