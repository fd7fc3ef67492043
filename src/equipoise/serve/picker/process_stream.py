"""One stream of the external processor, which is one request of a client.

head -> (body) -> queued -> picked -> answered -> ended

Envoy waits at `queued` for as long as no endpoint has a free slot: that is the late binding.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum, unique
from typing import Any, Protocol

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc.aio import EOF

from equipoise.balancer.requests.dispatcher import BoundToWorker, RequestClosed
from equipoise.hal.errors import EquipoiseError
from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled
from equipoise.serve.openai_protocol import EventReader, read_usage
from equipoise.serve.outcomes import (
    RETRY_AFTER,
    ErrorResponse,
    RequestOutcome,
    RequestRefused,
    bad_request,
    overloaded,
)
from equipoise.serve.picker.endpoint_pool import Endpoint, EndpointPool
from equipoise.serve.picker.messages import (
    CONTINUE,
    CONTINUE_WITHOUT_CHUNKS,
    FULL_DUPLEX,
    NO_BODY,
    SEEN_TO_THE_END,
    WHOLE_BODY,
    RequestHead,
    destination_reply,
    refusal_reply,
    request_head,
    response_header,
    response_status,
    served_endpoint,
    streamed_reply,
)
from equipoise.serve.picker.request_bodies import PARSED_PATHS, PromptSize, RequestBodies
from equipoise.serve.picker.settings import PickerSettings, TokenSource
from equipoise.serve.proxy_request import ProxyRequest

LOG = logging.getLogger("equipoise.picker")
ANSWER_BYTES = 1 << 20
"""Bytes of an answer that is no stream, of which the usage is read; a longer one is not kept."""
QUEUE_TIMEOUT = ErrorResponse(
    503, RequestOutcome.QUEUE_TIMEOUT, CancelReason.NO_FREE_SLOT.value, "queue_timeout", RETRY_AFTER
)
POLICY_FAILED = ErrorResponse(
    500, RequestOutcome.FAILED, "the policy failed at this request", "policy_failed"
)
SHUTTING_DOWN = ErrorResponse(
    503, RequestOutcome.SHUTTING_DOWN, "the picker is shutting down", "shutting_down", RETRY_AFTER
)


class StreamContext(Protocol):
    """What is used of a `grpc.aio.ServicerContext`."""

    async def read(self) -> Any:
        """The next message, or `EOF`."""

    async def write(self, message: bytes) -> None:
        """Send an answer."""


class ClientLeft(Exception):
    """Raised where Envoy closes the stream before the request was answered."""


@unique
class AnswerEnd(Enum):
    """What is known of the end of an answer, apart from that of its stream."""

    UNSEEN = "unseen"
    """Envoy does not send it: a client that left is not told from an answer that ended."""
    EXPECTED = "expected"
    """It has not come: if the stream ends first, the answer broke off."""
    SEEN = "seen"


class AnswerTokens:
    """Counts the tokens of an answer in its chunks.

    Attributes:
        prompt: prompt tokens as the worker counted them; None: it does not say.
    """

    def __init__(self, streamed: bool) -> None:
        self._events = EventReader() if streamed else None
        self._body = b""
        self.prompt: int | None = None

    def feed(self, chunk: bytes) -> int:
        """Tokens so far; of what is no stream, 0 until its end."""
        if self._events is None:
            if len(self._body) + len(chunk) <= ANSWER_BYTES:
                self._body += chunk
            return 0
        self._events.feed(chunk)
        self.prompt = self._events.usage.prompt
        return self._events.tokens

    @property
    def ended(self) -> bool:
        """Whether the event that ends a stream has come."""
        return self._events is not None and self._events.ended

    def total(self) -> int:
        """Tokens at the end."""
        if self._events is not None:
            return self._events.tokens
        usage = read_usage(self._body)
        self.prompt = usage.prompt
        return usage.completion or 0


class ProcessStream:
    """Answers the messages of one stream.

    Args:
        pool: picks the endpoint.
        settings: limits, timeouts, and whether tokens are counted in chunks.
        bodies: of all requests.
        context: of gRPC.

    Attributes:
        outcome: what became of the request; None as long as it is under way, and for requests that
            bring no tokens.
        queue_seconds: in which it waited for an endpoint.
    """

    def __init__(
        self,
        pool: EndpointPool,
        settings: PickerSettings,
        bodies: RequestBodies,
        context: StreamContext,
    ) -> None:
        self._pool, self._settings, self._bodies = pool, settings, bodies
        self._read: Callable[[], Awaitable[Any]] = context.read
        self._write = context.write
        self._pending: asyncio.Task[Any] | None = None
        self._state: ProxyRequest | None = None
        self._addresses: tuple[str, ...] = ()
        self._headers: tuple[tuple[str, str], ...] = ()
        self._size: PromptSize | None = None
        self._buffered_bytes = 0
        self._request_mode = self._response_mode = 0
        self._answer: AnswerTokens | None = None
        self._answer_end = AnswerEnd.UNSEEN
        self._path = ""
        self.outcome: RequestOutcome | None = None
        self.queue_seconds: float | None = None

    async def run(self) -> None:
        """Until the stream ends. However it ends, the policy learns of it."""
        try:
            await self._choose()
            while (message := await self._next()) is not EOF:
                await self._pass_on(message)
            self._check_end()
        except ClientLeft:
            self.outcome = RequestOutcome.CLIENT_DISCONNECTED
        except RequestRefused as refusal:
            self.outcome = refusal.error_response.outcome
            await self._write(refusal_reply(refusal.error_response, self._path))
        except asyncio.CancelledError:
            # Envoy resets the stream where the client left, and also of a whole answer.
            self._check_end()
            if not self._addresses:
                self.outcome = RequestOutcome.CLIENT_DISCONNECTED
            raise
        finally:
            if self._pending is not None:
                self._pending.cancel()
            self._release_body()
            self._end()

    def shut_down(self) -> bool:
        """Refuse it if it waits for an endpoint; returns whether it did."""
        state = self._state
        if state is None or state.scope is None:
            return False
        state.cancel(CancelReason.SHUTTING_DOWN)
        return True

    async def _choose(self) -> None:
        """From the head of a request to the answer that names its endpoint."""
        message = await self._expect()
        kind = message.WhichOneof("request")
        if kind != "request_headers":
            # Where Envoy does not send them there is nothing to answer with an endpoint.
            LOG.error("a stream begins with %s: set request_header_mode: SEND", kind)
            await self._write(CONTINUE[kind])
            return
        self._request_mode = message.protocol_config.request_body_mode
        self._response_mode = message.protocol_config.response_body_mode
        head = request_head(message)
        self._path = head.path.partition("?")[0]
        if not head.complete and self._request_mode in WHOLE_BODY:
            await self._write(CONTINUE["request_headers"])
            size = await self._size_of_whole_body(head)
            await self._write(await self._destination("request_body", head, size))
        elif not head.complete and self._request_mode == FULL_DUPLEX and head.needs_slot:
            await self._answer_stream(head)
        else:
            size = await self._prompt_size(head, b"")
            await self._write(await self._destination("request_headers", head, size))

    async def _size_of_whole_body(self, head: RequestHead) -> PromptSize:
        """Envoy has kept the body, and waits with the headers until its answer.

        It is read here, and let go before the request waits: Envoy has it.
        """
        message = await self._expect()
        if message.WhichOneof("request") != "request_body":
            raise bad_request("the body of the request did not come", code="no_body")
        body = message.request_body.body
        self._buffer(len(body))
        size = await self._prompt_size(head, body)
        self._release_body()
        return size

    async def _answer_stream(self, head: RequestHead) -> None:
        """Envoy keeps nothing: the head waits for the body, which then goes on as it came."""
        chunks: list[pb.HttpBody] = []
        trailers = False
        while not (trailers or (chunks and chunks[-1].end_of_stream)):
            message = await self._expect()
            trailers = message.WhichOneof("request") == "request_trailers"
            if not trailers:
                chunks.append(message.request_body)
                self._buffer(len(message.request_body.body))
        size = await self._prompt_size(head, b"".join(one.body for one in chunks))
        await self._write(await self._destination("request_headers", head, size))
        for one in chunks:
            await self._write(streamed_reply("request_body", one))
        self._release_body()
        if trailers:
            await self._write(CONTINUE["request_trailers"])

    def _buffer(self, more: int) -> None:
        # Counted before it can be refused: however the stream ends, all of it is released.
        self._buffered_bytes += more
        self._bodies.buffer(more, self._buffered_bytes)

    def _release_body(self) -> None:
        self._bodies.release(self._buffered_bytes)
        self._buffered_bytes = 0

    async def _prompt_size(self, head: RequestHead, body: bytes) -> PromptSize:
        path = head.path.partition("?")[0]
        self._size = await self._bodies.prompt_size(path, body, head.content_length)
        return self._size

    async def _destination(self, kind: str, head: RequestHead, size: PromptSize) -> bytes:
        """Wait for an endpoint; returns the answer that names it."""
        if not head.needs_slot:
            return self._named(kind, head, self._pool.any_endpoint(head.subset))
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            endpoint = await self._bound(size, head)
        except EquipoiseError:
            raise RequestRefused(POLICY_FAILED) from None  # logged where it failed
        finally:
            self.queue_seconds = loop.time() - began
        return self._named(kind, head, endpoint)

    def _named(self, kind: str, head: RequestHead, endpoint: Endpoint) -> bytes:
        self._addresses = self._pool.addresses(endpoint, head.subset)
        self._headers = endpoint.headers
        return destination_reply(kind, self._addresses, endpoint.headers)

    async def _bound(self, size: PromptSize, head: RequestHead) -> Endpoint:
        """Raises RequestRefused; ClientLeft."""
        state = self._submit(size, head)
        while True:
            if isinstance(state.status, BoundToWorker):
                endpoint = self._pool.endpoint(state.status)
                if self._pool.allows(endpoint, head.subset):
                    return endpoint
                # It waited for any, and this one is not of its subset.
                self._pool.abort(state)
                state = self._submit(size, head)
                continue
            if head.objective in self._settings.sheddable:
                raise overloaded(f"requests of the objective {head.objective!r} do not wait")
            try:
                await self._wait(state)
            except ScopeCancelled as cancellation:
                if cancellation.reason is CancelReason.NO_FREE_SLOT:
                    raise RequestRefused(QUEUE_TIMEOUT) from None
                if cancellation.reason is CancelReason.SHUTTING_DOWN:
                    raise RequestRefused(SHUTTING_DOWN) from None
                # A worker was lost. Where the policy has this request still it waits again, or has
                # another worker already: a second request would take a slot that nobody frees.
                if isinstance(state.status, RequestClosed):
                    # The only endpoint that it could go to: another one of its subset.
                    state = self._submit(size, head)

    def _submit(self, size: PromptSize, head: RequestHead) -> ProxyRequest:
        self._state = self._pool.submit(size.tokens, head.subset, size.blocks)
        return self._state

    async def _wait(self, state: ProxyRequest) -> None:
        """Until it is bound. Envoy says nothing meanwhile, unless the client leaves."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._read())
        binding = asyncio.ensure_future(state.wait_until_bound())
        try:
            async with CancelScope(None) as scope:
                state.scope = scope
                # What came before the answer is kept: only the end of the stream is news.
                waits = {binding} if self._pending.done() else {binding, self._pending}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            state.scope = None
            binding.cancel()
        if binding.done() and not binding.cancelled():
            binding.result()  # raises where it is gone
        if self._pending.done() and self._pending.result() is EOF:
            raise ClientLeft

    async def _pass_on(self, message: pb.ProcessingRequest) -> None:
        """Answer a message after the endpoint was named; nothing is changed.

        What the message says is noted before it is answered: Envoy may reset the stream as soon as
        it has the answer to the last one, and gRPC then cancels this task within the write.
        """
        kind = message.WhichOneof("request")
        match kind:
            case "response_headers":
                self._response_began(message)
                await self._write(self._response_reply())
            case "response_body":
                body = message.response_body
                self._count(body.body)
                if body.end_of_stream:
                    self._answer_ended()
                full_duplex = self._response_mode == FULL_DUPLEX
                await self._write(streamed_reply(kind, body) if full_duplex else CONTINUE[kind])
            case "request_body":
                body, full_duplex = message.request_body, self._request_mode == FULL_DUPLEX
                await self._write(streamed_reply(kind, body) if full_duplex else CONTINUE[kind])
            case _:
                if kind == "response_trailers":
                    self._answer_ended()
                await self._write(CONTINUE[kind])

    def _response_began(self, message: pb.ProcessingRequest) -> None:
        if self._state is None:
            return
        status, served = response_status(message), served_endpoint(message)
        self._doubt_failed(status, served)
        if status >= 400:
            # The worker's own refusal, or Envoy's answer where no endpoint could be reached.
            failed = status >= 500
            self.outcome = (
                RequestOutcome.WORKERS_FAILED if failed else RequestOutcome.REJECTED_BY_WORKER
            )
            self._end()
            return
        self.outcome = RequestOutcome.COMPLETED
        served = served or self._addresses[0]
        # Of a path that makes no tokens the policy would wait for one in every step, and others for
        # its decision. Whatever else does make some, such as a transcription, starts with those.
        makes_tokens = self._path in PARSED_PATHS
        answer = self._pool.start_answer if makes_tokens else self._pool.set_answering
        self._state = answer(self._state, served, self._headers)
        if self._settings.tokens is TokenSource.CHUNKS:
            kind = response_header(message, "content-type")
            self._answer = AnswerTokens(kind.startswith("text/event-stream"))
        if self._response_mode in SEEN_TO_THE_END and not self._declines_chunks:
            self._answer_end = AnswerEnd.EXPECTED
        if message.response_headers.end_of_stream:
            self._answer_ended()

    @property
    def _declines_chunks(self) -> bool:
        """Whether Envoy is asked to send no chunks, since nobody counts tokens in them."""
        counted = self._settings.tokens is TokenSource.CHUNKS
        return not counted and self._response_mode not in (NO_BODY, FULL_DUPLEX)

    def _response_reply(self) -> bytes:
        return CONTINUE_WITHOUT_CHUNKS if self._declines_chunks else CONTINUE["response_headers"]

    def _answer_ended(self) -> None:
        self._answer_end = AnswerEnd.SEEN
        self._end()

    def _check_end(self) -> None:
        """The stream is over: is the answer, too?"""
        if self._state is None:
            return
        broke_off = self._answer_end is AnswerEnd.EXPECTED
        if self.outcome is None or (broke_off and self.outcome is RequestOutcome.COMPLETED):
            self.outcome = RequestOutcome.CLIENT_DISCONNECTED

    def _doubt_failed(self, status: int, served: str | None) -> None:
        """Those that Envoy tried in vain: before the one that served, or all."""
        tried = self._addresses
        if served in tried:
            tried = tried[: tried.index(served) + (status >= 500)]
        elif status < 500:
            return
        for address in tried:
            self._pool.doubt(address)

    def _count(self, chunk: bytes) -> None:
        if self._answer is None or self._state is None:
            return
        tokens = self._answer.feed(chunk)
        if tokens:
            self._pool.report_tokens(self._state, tokens)
        if self._answer.ended:
            # With the last token, and not with the end of the stream: the policy is to know of the
            # free slot when it decides after this step.
            self._end()

    def _end(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        if self.outcome is not RequestOutcome.COMPLETED:
            self._pool.abort(state)
            return
        tokens = 0 if self._answer is None else self._answer.total()
        self._pool.finish(state, tokens)
        if self._answer is not None and self._answer.prompt is not None and self._size is not None:
            self._bodies.learn(self._size, self._answer.prompt)

    async def _expect(self) -> pb.ProcessingRequest:
        message = await self._next()
        if message is EOF:
            raise ClientLeft
        return message

    async def _next(self) -> Any:
        if self._pending is None:
            return await self._read()
        pending, self._pending = self._pending, None
        return await pending
