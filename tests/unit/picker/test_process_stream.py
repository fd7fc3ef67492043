"""One stream of Envoy's without a wire: what it leaves in the books, however it goes."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc.aio import EOF
from helpers.harnesses.picker_setup import endpoint_at, pool_of, run
from helpers.harnesses.proxy_setup import PATIENCE
from hypothesis import example, given
from hypothesis import strategies as st

from equipoise.balancer.requests import dispatcher
from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    CloseReason,
    RequestClosed,
    Running,
)
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.outcomes import RequestOutcome
from equipoise.serve.picker.endpoint_pool import SETTLE_SECONDS, EndpointPool
from equipoise.serve.picker.messages import DESTINATION, LB, SUBSET, SUBSET_HINT
from equipoise.serve.picker.process_stream import ProcessStream
from equipoise.serve.picker.request_bodies import RequestBodies
from equipoise.serve.picker.settings import PickerSettings, StaticEndpoints, TokenSource

ADDRESSES = "10.0.0.1:8000", "10.0.0.2:8000"
SETTINGS = PickerSettings(endpoints=StaticEndpoints(workers=()))


class QueuedStream:
    """A stream whose messages a test sends one by one.

    Attributes:
        replies: what the picker has answered.
        subset: the only endpoints that it may name; None: any.
        written: set, unless writes are to wait for it.
    """

    def __init__(self, pool: EndpointPool, settings: PickerSettings = SETTINGS) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: list[pb.ProcessingResponse] = []
        self.subset: Collection[str] | None = None
        self.written = asyncio.Event()
        self.written.set()
        self.process = ProcessStream(pool, settings, RequestBodies(settings.limits), self)
        self.task = asyncio.create_task(self.process.run())

    async def read(self) -> Any:
        return await self._messages.get()

    async def write(self, message: bytes) -> None:
        self.replies.append(pb.ProcessingResponse.FromString(message))
        await self.written.wait()

    def send(self, **message: Any) -> None:
        self._messages.put_nowait(pb.ProcessingRequest(**message))

    def send_head(
        self,
        method: str = "POST",
        path: str = "/v1/completions",
        subset: Collection[str] | None = None,
        answers: str = "NONE",
    ) -> None:
        """Of a request without a body."""
        headers = [(":method", method), (":path", path)]
        head = HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in headers])
        metadata = Metadata()
        if subset is not None:
            metadata.filter_metadata[SUBSET_HINT].update({SUBSET: list(subset)})
        self.send(
            request_headers=pb.HttpHeaders(headers=head, end_of_stream=True),
            metadata_context=metadata,
            protocol_config=pb.ProtocolConfiguration(
                response_body_mode=ProcessingMode.BodySendMode.Value(answers)
            ),
        )

    def send_answer_head(self, kind: str, ends: bool = False, status: int = 200) -> None:
        """The worker answers."""
        headers = [(":status", str(status)), ("content-type", kind)]
        head = HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in headers])
        self.send(response_headers=pb.HttpHeaders(headers=head, end_of_stream=ends))

    @property
    def destination(self) -> str | None:
        """The first endpoint that it names; None: it names none."""
        fields = self.replies[0].dynamic_metadata if self.replies else {}
        return str(fields[LB][DESTINATION]).split(",")[0] if LB in fields else None

    @property
    def status(self) -> int:
        """Of the picker's own answer."""
        return int(self.replies[-1].immediate_response.status.code)

    def send_end(self) -> None:
        """Envoy closes it."""
        self._messages.put_nowait(EOF)

    async def end(self) -> None:
        """Envoy closes it, and the picker is done with it."""
        self.send_end()
        await self.task

    async def reset(self) -> None:
        """Envoy resets it: gRPC cancels the task wherever it waits."""
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.task.cancelled()


async def turns(count: int = 20) -> None:
    """So many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("between", range(5))
def test_request_whose_worker_is_lost_has_one_entry_in_the_books(between: int) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES, slots=1)
        freed, busy = pool.submit(10), pool.submit(10)
        worker = freed.worker
        assert worker is not None
        stream = QueuedStream(pool)
        stream.send_head()
        await turns()
        assert pool.dispatcher.queued == 1
        pool.abort(freed)  # the stream's request is bound to `worker`
        await turns(between)
        pool.dispatcher.set_health(worker, WorkerState.LOST)
        await turns()
        assert len(pool.dispatcher.requests) == 2
        pool.abort(busy)
        await turns()
        assert [type(one.status) for one in pool.dispatcher.requests] == [BoundToWorker]
        await stream.end()
        assert not pool.dispatcher.requests
        assert all(not view.requests for view in pool.dispatcher.workers)

    run(work())


@pytest.mark.parametrize("left", [True, False])
def test_restricted_request_without_another_endpoint_waits_only_for_health(left: bool) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES, slots=1)
        held = {one: pool.submit(9, frozenset([one])) for one in ADDRESSES}
        stream = QueuedStream(pool)
        stream.send_head(subset=ADDRESSES[:1])
        await turns()
        if left:
            pool.set_endpoints([endpoint_at(ADDRESSES[1], slots=1)])
            await turns()
            assert stream.status == 503
        else:
            [number] = [one.number for one in pool.endpoints if one.address == ADDRESSES[0]]
            pool.dispatcher.set_health(number, WorkerState.DRAINING)
            await turns()
            assert not stream.replies
            pool.dispatcher.set_health(number, WorkerState.SERVING)
            pool.abort(held[ADDRESSES[0]])
            await turns()
            assert stream.destination == ADDRESSES[0]
        await stream.end()
        for one in held.values():
            pool.abort(one)

    run(work())


@pytest.mark.parametrize(("healthy", "status"), [(ADDRESSES, 0), (ADDRESSES[1:], 503)])
def test_subset_holds_for_what_waited_while_all_were_in_doubt(
    healthy: Sequence[str], status: int
) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES, slots=1)
        set_health(pool, ADDRESSES, WorkerState.DRAINING)
        stream = QueuedStream(pool)
        stream.send_head(subset=ADDRESSES[:1])
        await turns()
        assert not stream.replies
        # The other one comes first: it is bound there, and must not go there.
        set_health(pool, reversed(healthy), WorkerState.SERVING)
        await turns()
        assert (stream.destination, stream.status) == (None if status else ADDRESSES[0], status)
        await stream.end()
        assert not pool.dispatcher.requests

    run(work())


def set_health(pool: EndpointPool, addresses: Iterable[str], state: WorkerState) -> None:
    """As its monitors would."""
    for address in addresses:
        [number] = [one.number for one in pool.endpoints if one.address == address]
        pool.dispatcher.set_health(number, state)


@pytest.mark.parametrize("subset", [None, ADDRESSES[:1]])
def test_request_waits_for_the_first_health_check(subset: Sequence[str] | None) -> None:
    async def work() -> None:
        pool = pool_of()
        pool.set_endpoints([endpoint_at(ADDRESSES[0])])
        stream = QueuedStream(pool)
        stream.send_head(subset=subset)
        await turns()
        assert not stream.replies
        set_health(pool, ADDRESSES[:1], WorkerState.SERVING)
        await turns()
        assert stream.destination == ADDRESSES[0]
        await stream.end()

    run(work())


def test_request_is_refused_once_a_health_check_has_failed() -> None:
    async def work() -> None:
        pool = pool_of()
        pool.set_endpoints([endpoint_at(ADDRESSES[0])])
        set_health(pool, ADDRESSES[:1], WorkerState.LOST)
        stream = QueuedStream(pool)
        stream.send_head()
        await turns()
        assert stream.status == 503
        # Its number is another endpoint's from now on, of which nothing is known.
        pool.set_endpoints([endpoint_at(ADDRESSES[1])])
        stream = QueuedStream(pool)
        stream.send_head()
        await turns()
        assert not stream.replies
        await stream.end()

    run(work())


def test_request_that_needs_no_slot_is_sent_while_all_are_in_doubt() -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES)
        set_health(pool, ADDRESSES, WorkerState.DRAINING)
        seen = set()
        for _ in ADDRESSES:
            stream = QueuedStream(pool)
            stream.send_head("GET", "/v1/models")
            await turns()
            seen.add(stream.destination)
            await stream.end()
        assert seen == set(ADDRESSES)  # in turns

    run(work())


PORTS = st.integers(0, len(ADDRESSES) - 1)
EVENTS_OF_A_POOL = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.none() | st.sets(PORTS, min_size=1)),
        st.tuples(st.just("answer"), st.integers(0, 20)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("health"), st.tuples(PORTS, st.sampled_from(WorkerState))),
        st.tuples(st.just("list"), st.sets(PORTS)),
        st.tuples(st.just("turns"), st.integers(1, 6)),
    ),
    max_size=40,
)
FULL: list[tuple[str, Any]] = [("request", None)] * 3 + [("turns", 6)]
"""With it one request waits."""


@example(events=[("end", 0), ("turns", 2), ("health", (0, WorkerState.LOST)), ("turns", 6)])
@example(
    events=[
        *(("health", (port, WorkerState.DRAINING)) for port in (0, 1)),
        *(("end", number) for number in (0, 1, 2)),
        ("request", {0}),
        ("turns", 6),
        ("health", (1, WorkerState.SERVING)),
        ("health", (0, WorkerState.SERVING)),
        ("turns", 6),
    ]
)
@example(events=[("list", {0}), ("health", (1, WorkerState.LOST)), ("list", set())])
@given(events=EVENTS_OF_A_POOL)
def test_streams_have_at_most_one_request_each_whatever_happens(
    events: Sequence[tuple[str, Any]],
) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES, slots=1)
        streams: list[QueuedStream] = []
        for event, how in [*FULL, *events]:
            match event:
                case "request":
                    streams.append(QueuedStream(pool))
                    streams[-1].subset = None if how is None else {ADDRESSES[n] for n in how}
                    streams[-1].send_head(subset=streams[-1].subset)
                case "answer" | "end" if streams:
                    stream = streams[how % len(streams)]
                    if event == "answer" and stream.replies:
                        stream.send_answer_head(EVENTS)
                    elif event == "end":
                        stream.send_end()
                case "health":
                    listed = {one.address for one in pool.endpoints}
                    set_health(pool, listed & {ADDRESSES[how[0]]}, how[1])
                case "list":
                    pool.set_endpoints([endpoint_at(ADDRESSES[n], slots=1) for n in how])
                case "turns":
                    await turns(how)
            assert len(pool.dispatcher.requests) <= sum(not one.task.done() for one in streams)
        for stream in streams:
            await stream.end()
            if stream.subset is not None and stream.destination is not None:
                assert stream.destination in stream.subset
        await turns()
        assert not pool.dispatcher.requests
        assert pool.dispatcher.policy_errors == 0
        pool.close()

    run(work())


EVENTS, JSON = "text/event-stream", "application/json"
PART, WHOLE = pb.HttpBody(body=b"{"), pb.HttpBody(body=b"{}", end_of_stream=True)
DONE = pb.HttpBody(body=b"data: [DONE]\n\n")
COMPLETED, LEFT = RequestOutcome.COMPLETED, RequestOutcome.CLIENT_DISCONNECTED
CHUNKS, METRICS = TokenSource.CHUNKS, TokenSource.METRICS


@pytest.mark.parametrize(
    ("answers", "tokens", "kind", "chunks", "outcome"),
    [
        ("STREAMED", CHUNKS, EVENTS, [], LEFT),
        ("STREAMED", CHUNKS, EVENTS, [DONE], COMPLETED),
        ("STREAMED", CHUNKS, JSON, [PART], LEFT),
        ("STREAMED", CHUNKS, JSON, [WHOLE], COMPLETED),
        ("STREAMED", METRICS, JSON, [], COMPLETED),  # Envoy was told to send no chunk
        ("BUFFERED", CHUNKS, JSON, [], LEFT),
        ("BUFFERED_PARTIAL", CHUNKS, JSON, [PART], COMPLETED),  # the rest is never sent
        ("FULL_DUPLEX_STREAMED", METRICS, JSON, [PART], LEFT),
        ("FULL_DUPLEX_STREAMED", METRICS, JSON, [WHOLE], COMPLETED),
        ("NONE", CHUNKS, EVENTS, [], COMPLETED),  # nobody can tell
    ],
)
def test_client_that_leaves_its_answer_is_told_from_an_end(
    answers: str,
    tokens: TokenSource,
    kind: str,
    chunks: list[pb.HttpBody],
    outcome: RequestOutcome,
) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES)
        stream = QueuedStream(pool, replace(SETTINGS, tokens=tokens))
        stream.send_head(answers=answers)
        await turns()
        [request] = pool.dispatcher.requests
        stream.send_answer_head(kind)
        for chunk in chunks:
            stream.send(response_body=chunk)
        await turns()
        await stream.end()
        ends = CloseReason.FINISHED if outcome is COMPLETED else CloseReason.ABORTED
        assert (stream.process.outcome, request.status) == (outcome, RequestClosed(ends))

    run(work())


@pytest.mark.parametrize("answers", ["STREAMED", "FULL_DUPLEX_STREAMED"])
@pytest.mark.parametrize(
    ("kind", "last", "outcome"),
    [
        (JSON, {"response_body": WHOLE}, COMPLETED),
        (JSON, {"response_body": pb.HttpBody(end_of_stream=True)}, COMPLETED),
        (JSON, {"response_trailers": pb.HttpTrailers()}, COMPLETED),
        (EVENTS, {"response_body": DONE}, COMPLETED),
        (JSON, {"response_body": PART}, LEFT),
    ],
)
def test_answer_has_ended_where_envoy_resets_within_the_last_write(
    answers: str, kind: str, last: dict[str, Any], outcome: RequestOutcome
) -> None:
    """Envoy 1.40 did so in 17 of 600 answers on a busy machine."""

    async def work() -> None:
        pool = pool_of(*ADDRESSES)
        stream = QueuedStream(pool)
        stream.send_head(answers=answers)
        await turns()
        [request] = pool.dispatcher.requests
        stream.send_answer_head(kind)
        await turns()
        stream.written.clear()
        stream.send(**last)
        await turns()
        assert len(stream.replies) == 3
        await stream.reset()
        ends = CloseReason.FINISHED if outcome is COMPLETED else CloseReason.ABORTED
        assert (stream.process.outcome, request.status) == (outcome, RequestClosed(ends))

    run(work())


def test_request_that_needs_no_slot_is_not_counted_where_envoy_resets() -> None:
    async def work() -> None:
        stream = QueuedStream(pool_of(*ADDRESSES))
        stream.send_head("GET", "/v1/models", answers="STREAMED")
        stream.send_answer_head(JSON)
        stream.send(response_body=WHOLE)
        await turns()
        await stream.reset()
        assert stream.process.outcome is None

    run(work())


@pytest.mark.parametrize("named", [False, True])
def test_client_that_leaves_is_counted_where_envoy_resets(named: bool) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES)
        stream = QueuedStream(pool)
        if named:
            stream.send_head()
        await turns()
        await stream.reset()
        assert stream.process.outcome is LEFT
        assert not pool.dispatcher.requests

    run(work())


@pytest.mark.parametrize("ends", [False, True])
def test_answer_may_end_with_its_head_or_its_trailers(ends: bool) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES)
        stream = QueuedStream(pool)
        stream.send_head(answers="STREAMED")
        stream.send_answer_head(JSON, ends)
        if not ends:
            stream.send(response_trailers=pb.HttpTrailers())
        await stream.end()
        assert stream.process.outcome is COMPLETED

    run(work())


@pytest.mark.parametrize("tokens", TokenSource)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/files"])
def test_slot_of_request_without_tokens_is_free_at_its_end(
    monkeypatch: pytest.MonkeyPatch, tokens: TokenSource, path: str
) -> None:
    """In lockstep the policy waited for a token of the other one, until its time-out."""
    monkeypatch.setattr(dispatcher, "STEP_TIMEOUT_SECONDS", PATIENCE)

    async def work() -> None:
        pool = pool_of(*ADDRESSES, slots=1, tokens=tokens, lockstep=True)
        settings = replace(SETTINGS, tokens=tokens)
        streams = [QueuedStream(pool, settings) for _ in range(4)]
        for stream in streams:
            stream.send_head(path=path, answers="FULL_DUPLEX_STREAMED")
            await turns()
        lasting, *others = streams
        lasting.send_answer_head(JSON)
        for ending, waiting in pairwise(others):
            assert waiting.destination is None
            ending.send_answer_head(JSON)
            await turns()
            ending.send(response_body=WHOLE)
            for _ in range(50):
                await asyncio.sleep(SETTLE_SECONDS)
            assert waiting.destination == ending.destination
        for stream in streams:
            await stream.end()
        assert others[0].process.outcome is COMPLETED
        pool.close()

    run(work())


def test_tokens_of_unknown_path_are_counted_where_it_makes_some() -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES)
        stream = QueuedStream(pool)
        stream.send_head(path="/v1/audio/transcriptions", answers="STREAMED")
        stream.send_answer_head(EVENTS)
        await turns()
        [request] = pool.dispatcher.requests
        assert (type(request.status), request.tokens) == (BoundToWorker, 0)
        event = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        stream.send(response_body=pb.HttpBody(body=event * 2))
        await turns()
        assert (type(request.status), request.tokens) == (Running, 2)
        stream.send(response_body=DONE)
        await stream.end()
        assert request.status == RequestClosed(CloseReason.FINISHED)

    run(work())


@pytest.mark.parametrize("answering", [False, True])
def test_answered_request_without_tokens_is_bound_to_no_other_endpoint(answering: bool) -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES, slots=1)
        stream = QueuedStream(pool)
        stream.send_head(path="/v1/embeddings")
        await turns()
        if answering:
            stream.send_answer_head(JSON)
            await turns()
        assert stream.destination is not None
        set_health(pool, [stream.destination], WorkerState.LOST)
        await turns()
        # Envoy may still send down its list what is not answered.
        assert len(pool.dispatcher.requests) == (not answering)
        await stream.end()
        assert not pool.dispatcher.requests

    run(work())


def test_slot_of_refused_request_is_free_with_the_refusal() -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES[:1], slots=1)
        refused, waiting = QueuedStream(pool), QueuedStream(pool)
        for stream in (refused, waiting):
            stream.send_head()
            await turns()
        refused.send_answer_head(JSON, ends=True, status=404)
        await turns()
        assert waiting.destination == ADDRESSES[0]
        await refused.end()
        assert refused.process.outcome is RequestOutcome.REJECTED_BY_WORKER
        await waiting.end()

    run(work())


def test_client_that_leaves_before_its_answer_is_counted() -> None:
    async def work() -> None:
        pool = pool_of(*ADDRESSES)
        stream = QueuedStream(pool)
        stream.send_head()
        await stream.end()
        assert stream.process.outcome is LEFT
        assert not pool.dispatcher.requests

    run(work())
