"""One stream of Envoy's without a wire: what it leaves in the books, however it goes."""

import asyncio
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc.aio import EOF
from helpers.harnesses.picker_setup import pool_of, run

from equipoise.balancer.requests.dispatcher import BoundToWorker
from equipoise.balancer.requests.policy import WorkerState
from equipoise.serve.picker.endpoint_pool import EndpointPool
from equipoise.serve.picker.process_stream import ProcessStream
from equipoise.serve.picker.settings import PickerSettings, StaticEndpoints
from equipoise.serve.relay import PromptTokenEstimator

ADDRESSES = "10.0.0.1:8000", "10.0.0.2:8000"
SETTINGS = PickerSettings(endpoints=StaticEndpoints(workers=()))


class QueuedStream:
    """A stream whose messages a test sends one by one.

    Attributes:
        replies: what the picker has answered.
    """

    def __init__(self, pool: EndpointPool) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: list[pb.ProcessingResponse] = []
        self.process = ProcessStream(pool, SETTINGS, PromptTokenEstimator(), self)
        self.task = asyncio.create_task(self.process.run())

    async def read(self) -> Any:
        return await self._messages.get()

    async def write(self, message: bytes) -> None:
        self.replies.append(pb.ProcessingResponse.FromString(message))

    def send(self, **message: Any) -> None:
        self._messages.put_nowait(pb.ProcessingRequest(**message))

    def send_head(self, method: str = "POST", path: str = "/v1/completions") -> None:
        """Of a request without a body."""
        headers = [(":method", method), (":path", path)]
        head = HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in headers])
        self.send(request_headers=pb.HttpHeaders(headers=head, end_of_stream=True))

    async def end(self) -> None:
        """Envoy closes it."""
        self._messages.put_nowait(EOF)
        await self.task


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
