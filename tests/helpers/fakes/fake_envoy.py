"""An Envoy with the `ext_proc` filter, as far as an endpoint picker sees it.

It speaks the protocol strictly: each message gets one answer, of its own kind; header and metadata
name the same endpoints; a chunk of a full-duplex body goes on as it was. It sends requests down the
list of endpoints, over HTTP, and says which one served.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
KEY = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
PIECE = 1 << 14
RETRIED = 502, 503, 504


@dataclass(frozen=True)
class BodyModes:
    """Which bodies the picker is sent, by the names of `BodySendMode`."""

    request: str = "BUFFERED"
    response: str = "NONE"

    def config(self) -> pb.ProtocolConfiguration | None:
        if (self.request, self.response) == ("NONE", "NONE"):
            return None
        value = ProcessingMode.BodySendMode.Value
        return pb.ProtocolConfiguration(
            request_body_mode=value(self.request), response_body_mode=value(self.response)
        )


@dataclass
class EnvoyAnswer:
    """What a client got, and how.

    Attributes:
        immediate: whether the picker answered itself.
        endpoints: those that the picker named, in order.
        forwarded: headers and body as the worker got them.
        served: the endpoint that answered; empty: none did.
        broken: whether the answer broke off.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    immediate: bool = False
    endpoints: list[str] = field(default_factory=list)
    forwarded: dict[str, str] = field(default_factory=dict)
    forwarded_body: bytes = b""
    served: str = ""
    broken: bool = False


class FakeEnvoy:
    """Requests through one picker.

    Args:
        channel: to the picker.
        client: to the workers.
        modes: of bodies.
        says_served: whether the picker is told which endpoint served.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        client: aiohttp.ClientSession,
        modes: BodyModes,
        says_served: bool = True,
    ) -> None:
        self._client, self._modes, self._says_served = client, modes, says_served
        self._process = channel.stream_stream(
            PATH,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )

    async def send(
        self,
        body: bytes = b"",
        path: str = "/v1/completions",
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        subset: Sequence[str] | None = None,
    ) -> EnvoyAnswer:
        """One request of a client. A task that is cancelled is a client that leaves."""
        call = self._process()
        answer = EnvoyAnswer()
        stream = _RequestStream(self, call, answer, subset)
        try:
            await stream.run(method, path, body, headers or {})
            assert await stream.close() is grpc.aio.EOF, "an answer that nobody asked for"
            assert await call.code() is grpc.StatusCode.OK
        except asyncio.CancelledError:
            await stream.close()
            raise
        finally:
            call.cancel()  # does nothing where it has ended
        return answer


class _RequestStream:
    def __init__(
        self, envoy: FakeEnvoy, call: Any, answer: EnvoyAnswer, subset: Sequence[str] | None
    ) -> None:
        self._envoy, self._call, self._answer, self._subset = envoy, call, answer, subset
        self._modes = envoy._modes
        self._reading: asyncio.Future[Any] | None = None

    async def close(self) -> Any:
        """As Envoy does: it says that no more comes, and waits for the end of the stream."""
        await self._call.done_writing()
        return await self._read()

    async def _read(self) -> Any:
        # A read that is cancelled would reset the stream, which Envoy does not.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        message = await asyncio.shield(self._reading)
        self._reading = None
        return message

    async def run(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        sent = {":method": method, ":path": path, ":authority": "fake", **headers}
        if body:
            sent["content-length"] = str(len(body))
        answer = self._answer
        answer.forwarded = {key: value for key, value in sent.items() if key[0] != ":"}
        message = pb.ProcessingRequest(
            request_headers=pb.HttpHeaders(headers=_header_map(sent), end_of_stream=not body),
            metadata_context=self._metadata(),
        )
        config = self._modes.config()
        if config is not None:
            message.protocol_config.CopyFrom(config)
        if await self._request(message, body):
            await self._upstream(method, path)

    async def _request(self, message: pb.ProcessingRequest, body: bytes) -> bool:
        """To the destination; False: the picker answered itself."""
        mode = self._modes.request if body else "NONE"
        await self._call.write(message)
        if mode == "FULL_DUPLEX_STREAMED":
            return await self._full_duplex(body)
        reply = await self._reply("request_headers")
        if reply is None:
            return False
        self._answer.forwarded_body = body
        if mode == "BUFFERED":
            assert not self._take_destination(reply), "named before the body was read"
            reply = await self._ask(request_body=pb.HttpBody(body=body, end_of_stream=True))
            if reply is None:
                return False
        assert self._take_destination(reply), "no endpoint is named"
        if mode == "STREAMED":
            for chunk in _pieces(body):
                assert await self._ask(request_body=chunk) is not None
        return True

    async def _full_duplex(self, body: bytes) -> bool:
        for chunk in _pieces(body):
            await self._call.write(pb.ProcessingRequest(request_body=chunk))
        reply = await self._reply("request_headers")
        if reply is None:
            return False
        assert self._take_destination(reply)
        done, got = False, b""
        while not done:
            reply = await self._reply("request_body")
            assert reply is not None
            chunk = reply.request_body.response.body_mutation.streamed_response
            got, done = got + chunk.body, chunk.end_of_stream
        assert got == body
        self._answer.forwarded_body = got
        return True

    def _take_destination(self, reply: pb.ProcessingResponse) -> bool:
        kind = reply.WhichOneof("response")
        changed = getattr(reply, kind).response.header_mutation.set_headers
        if not changed and not reply.HasField("dynamic_metadata"):
            return False
        for one in changed:
            assert one.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
            self._answer.forwarded[one.header.key] = one.header.raw_value.decode()
        value = self._answer.forwarded[KEY]
        assert reply.dynamic_metadata["envoy.lb"][KEY] == value
        self._answer.endpoints = value.split(",")
        return True

    async def _upstream(self, method: str, path: str) -> None:
        for address in self._answer.endpoints:
            try:
                async with self._envoy._client.request(
                    method,
                    f"http://{address}{path}",
                    data=self._answer.forwarded_body or None,
                    headers=self._answer.forwarded,
                ) as response:
                    if response.status in RETRIED and address != self._answer.endpoints[-1]:
                        continue
                    self._answer.served = address
                    await self._pass_on(response)
                    return
            except (aiohttp.ClientError, OSError):
                if self._answer.status:
                    self._answer.broken = True  # a client has a part of it: no other can follow
                    return
        await self._local_reply()

    async def _local_reply(self) -> None:
        """Envoy's own answer, which the filter sees like any other."""
        self._answer.status = 503
        await self._response_headers({":status": "503"}, ends=True)

    async def _pass_on(self, response: aiohttp.ClientResponse) -> None:
        head = {":status": str(response.status), "content-type": response.content_type}
        await self._response_headers(head, ends=False)
        self._answer.status = response.status
        async for chunk in response.content.iter_any():
            await self._chunk(chunk, ends=False)
        await self._chunk(b"", ends=True)

    async def _response_headers(self, head: dict[str, str], ends: bool) -> None:
        headers = pb.HttpHeaders(headers=_header_map(head), end_of_stream=ends)
        assert await self._ask(response_headers=headers) is not None

    async def _chunk(self, chunk: bytes, ends: bool) -> None:
        self._answer.body += chunk
        if self._modes.response == "NONE":
            return
        reply = await self._ask(response_body=pb.HttpBody(body=chunk, end_of_stream=ends))
        assert reply is not None
        if self._modes.response == "FULL_DUPLEX_STREAMED":
            passed_on = reply.response_body.response.body_mutation.streamed_response
            assert (passed_on.body, passed_on.end_of_stream) == (chunk, ends)

    async def _ask(self, **message: Any) -> pb.ProcessingResponse | None:
        await self._call.write(pb.ProcessingRequest(metadata_context=self._metadata(), **message))
        [kind] = message
        return await self._reply(kind)

    async def _reply(self, kind: str) -> pb.ProcessingResponse | None:
        """None: it is the answer to the client."""
        reply = await self._read()
        assert reply is not grpc.aio.EOF, f"no answer to {kind}"
        if reply.WhichOneof("response") == "immediate_response":
            immediate, answer = reply.immediate_response, self._answer
            answer.immediate, answer.status = True, immediate.status.code
            answer.body = bytes(immediate.body)
            answer.headers = {
                one.header.key: one.header.raw_value.decode()
                for one in immediate.headers.set_headers
            }
            return None
        assert reply.WhichOneof("response") == kind
        return reply

    def _metadata(self) -> Metadata:
        metadata = Metadata()
        if self._subset is not None:
            metadata.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: list(self._subset)})
        if self._answer.served and self._envoy._says_served:
            metadata.filter_metadata["envoy.lb"].update({SERVED: self._answer.served})
        return metadata


def _header_map(headers: Mapping[str, str]) -> HeaderMap:
    return HeaderMap(
        headers=[HeaderValue(key=key, raw_value=text.encode()) for key, text in headers.items()]
    )


def _pieces(body: bytes) -> list[pb.HttpBody]:
    starts = range(0, len(body), PIECE)
    last = starts[-1]
    return [
        pb.HttpBody(body=body[start : start + PIECE], end_of_stream=start == last)
        for start in starts
    ]


@asynccontextmanager
async def fake_envoy(
    port: int, modes: BodyModes, says_served: bool = True, trusted: bytes | None = None
) -> AsyncIterator[FakeEnvoy]:
    """In front of the picker at a port of this machine; over TLS where a certificate is trusted."""
    address = f"127.0.0.1:{port}"
    async with (
        grpc.aio.insecure_channel(address)
        if trusted is None
        else grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(root_certificates=trusted)
        ) as channel,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        yield FakeEnvoy(channel, client, modes, says_served)


async def until_left(task: asyncio.Task[EnvoyAnswer]) -> None:
    """A client leaves: its request is cancelled."""
    task.cancel()
    await asyncio.wait([task])
