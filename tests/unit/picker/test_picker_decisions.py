"""Whether what is simulated is what the picker does: a trace through both, request by request."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc.aio import EOF
from helpers.fakes.fake_envoy import KEY
from helpers.harnesses.picker_setup import run

from equipoise.balancer.requests.cluster import Cluster, StepTime
from equipoise.balancer.requests.policy import WorkerState
from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings, WhenFull
from equipoise.balancer.requests.simulation import SaturatedArrivals, Scenario, simulate
from equipoise.balancer.requests.workload import Workload
from equipoise.balancer.requests.workload_generators import generate
from equipoise.serve.picker.endpoint_pool import EndpointPool
from equipoise.serve.picker.process_stream import ProcessStream
from equipoise.serve.picker.request_bodies import RequestBodies
from equipoise.serve.picker.settings import PickerSettings, StaticEndpoints
from equipoise.serve.settings import WorkerSettings

WORKERS, SLOTS, REQUESTS = 4, 4, 160
BACKLOG = WORKERS * SLOTS
"""As many as there are slots: all of the first requests are bound at once."""
TOKEN = b'data: {"choices": [{"index": 0, "text": "token"}]}\n\n'
DONE = b"data: [DONE]\n\n"
OPTIONS: dict[str, dict[str, Any]] = {"fit": {"slack": 0.0}, "br0": {}}
"""With slack, equal requests may go to workers in another order at once than one by one."""
TURNS = 6
"""Turns of the loop in which a message is answered, counted, and told to the policy."""


@dataclass(eq=False)
class Stream:
    """One request of Envoy's, without a wire."""

    name: int
    output: int
    made: int = 0
    endpoint: str = ""
    messages: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)

    async def read(self) -> Any:
        return await self.messages.get()

    async def write(self, message: bytes) -> None:
        reply = pb.ProcessingResponse.FromString(message)
        if reply.WhichOneof("response") == "request_body":
            [destination] = reply.request_body.response.header_mutation.set_headers
            assert destination.header.key == KEY
            self.endpoint = destination.header.raw_value.decode().split(",")[0]

    def say(self, **message: Any) -> None:
        self.messages.put_nowait(pb.ProcessingRequest(**message))


class Replay:
    """The picker between a trace and workers in lockstep."""

    def __init__(self, policy: str, workload: Workload) -> None:
        workers = tuple(
            WorkerSettings(url=f"http://127.0.0.1:{n + 1}", name=f"w{n}", slots=SLOTS)
            for n in range(WORKERS)
        )
        self._settings = PickerSettings(endpoints=StaticEndpoints(workers=workers))
        self._pool = EndpointPool(routing_policy_factory(policy, OPTIONS[policy]), self._settings)
        self._pool.set_endpoints(workers)
        for one in self._pool.endpoints:
            self._pool.dispatcher.set_health(one.number, WorkerState.SERVING)
        self._todo = iter(zip(workload.prompts.tolist(), workload.outputs.tolist(), strict=True))
        self._streams: list[Stream] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def play(self) -> list[int]:
        """The worker of each request."""
        await self._arrive()
        while running := self._begin():
            # The first token of the step, then arrivals, then the rest: while a step is told in
            # part nothing is decided, and the simulator too has arrivals before a step's events.
            first, rest = running[:1], running[1:]
            last = self._make(first)
            await self._settle()
            await self._arrive()
            last += self._make(rest)
            await self._settle()
            for stream in last:
                stream.messages.put_nowait(EOF)
        await asyncio.gather(*self._tasks)
        return [int(one.endpoint.rpartition(":")[2]) - 1 for one in self._streams]

    async def _arrive(self) -> None:
        while self._pool.dispatcher.queued < BACKLOG or len(self._streams) < BACKLOG:
            request = next(self._todo, None)
            if request is None:
                return
            await self._submit(*request)
            if len(self._streams) == BACKLOG:
                return

    async def _submit(self, prompt: int, output: int) -> None:
        stream = Stream(len(self._streams), output)
        self._streams.append(stream)
        process = ProcessStream(
            self._pool, self._settings, RequestBodies(self._settings.limits), stream
        )
        self._tasks.append(asyncio.create_task(process.run()))
        mode = ProcessingMode.BodySendMode.Value
        head = {":method": "POST", ":path": "/v1/completions"}
        stream.say(
            request_headers=pb.HttpHeaders(headers=headers(head)),
            protocol_config=pb.ProtocolConfiguration(
                request_body_mode=mode("BUFFERED"), response_body_mode=mode("STREAMED")
            ),
        )
        body = json.dumps({"model": "m", "prompt": [0] * prompt, "stream": True}).encode()
        stream.say(request_body=pb.HttpBody(body=body, end_of_stream=True))
        await self._settle()

    def _begin(self) -> list[Stream]:
        """Those that have an endpoint and are not done."""
        return [one for one in self._streams if one.endpoint and one.made < one.output]

    def _make(self, streams: Sequence[Stream]) -> list[Stream]:
        """A token for each; returns those that end."""
        for stream in streams:
            if not stream.made:
                head = {":status": "200", "content-type": "text/event-stream"}
                stream.say(response_headers=pb.HttpHeaders(headers=headers(head)))
            stream.made += 1
            chunk = TOKEN + DONE if stream.made == stream.output else TOKEN
            stream.say(response_body=pb.HttpBody(body=chunk))
        return [one for one in streams if one.made == one.output]

    async def _settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)


def headers(fields: dict[str, str]) -> HeaderMap:
    return HeaderMap(
        headers=[HeaderValue(key=key, raw_value=text.encode()) for key, text in fields.items()]
    )


def trace(seed: int) -> Workload:
    """Drawn; the first ones are alike, since the simulator has them all before it decides."""
    drawn = generate("prop", REQUESTS, seed)
    prompts, outputs = drawn.prompts // 20 + 1, drawn.outputs // 40 + 1
    prompts[:BACKLOG] = 30
    return Workload(name="trace", arrivals=None, prompts=prompts, outputs=outputs)


@pytest.mark.parametrize("policy", OPTIONS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_picker_binds_as_the_simulator(policy: str, seed: int) -> None:
    async def work() -> list[int]:
        return await Replay(policy, workload).play()

    workload = trace(seed)
    scenario = Scenario(
        cluster=Cluster(workers=WORKERS, slots=SLOTS, step=StepTime(fixed=1.0, per_token=0.0)),
        policy=RoutingPolicySettings(name=policy, when_full=WhenFull.HOLD, **OPTIONS[policy]),
        arrivals=SaturatedArrivals(backlog=BACKLOG),
        seed=seed,
    )
    simulated = simulate(workload, scenario).requests.worker.tolist()
    picked = run(work())
    # At the end the backlog runs dry, and the simulator decides over what is left at once.
    compared = REQUESTS - BACKLOG
    assert picked[:compared] == simulated[:compared]
    assert len(set(picked)) == WORKERS
    assert np.bincount(picked).min() > REQUESTS // WORKERS // 2
