"""vLLM's own client, with our part in it, without engines: its books, its messages, its outputs.

Plays are the same for every version that is tested; what they import of vLLM is the one at hand.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from helpers.harnesses.request_routing_scenario import run

from equipoise.integrations.vllm.dp.core_client import CLIENT_PATCH, attach_scheduler
from equipoise.integrations.vllm.patching import apply_patches, undo_patches

SentMessage = tuple[bytes, str, Any]


class Wire:
    """What a client sends, in the place of its sockets."""

    def __init__(self, client: Any) -> None:
        self.messages: list[SentMessage] = []
        client._send_input = self.send_input
        client._ensure_stats_update_task = client._ensure_output_queue_task = lambda: None
        client.first_req_send_socket = SimpleNamespace(send=self.first)
        self.woken = 0

    @property
    def engines(self) -> list[bytes]:
        """Where messages went, in order."""
        return [engine for engine, _, _ in self.messages]

    def send_input(self, kind: Any, request: Any, engine: bytes) -> asyncio.Future[None]:
        wave = getattr(request, "current_wave", None)
        self.messages.append((engine, kind.name, (getattr(request, "request_id", request), wave)))
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    async def first(self, message: bytes) -> None:
        self.woken += 1


def make_client(slots: int, routing: Any, servers: int = 1, server: int = 0) -> tuple[Any, Wire]:
    """A client that has met two engines, of one of so many API servers."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    client = object.__new__(DPLBAsyncMPClient)
    client.vllm_config = SimpleNamespace(
        additional_config={"equipoise": {"dp_load_balancer": routing}},
        cache_config=SimpleNamespace(
            kv_cache_size_tokens=4096, num_gpu_blocks=512, block_size=16, enable_prefix_caching=True
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=slots),
    )
    client.client_count, client.client_index, client.current_wave = servers, server, 5
    client.stats_update_address = "ipc:///tmp/statistics"
    client.core_engines, client.engine_ranks_managed = [b"\0\0", b"\1\0"], [0, 1]
    client.lb_engines = counts((0, 0), (0, 0))
    client.reqs_in_flight, client.engine_inflight = {}, Counter()
    client.streaming_reqs = set()  # since 0.33
    client.eng_start_index, client.engines_running = 0, False
    client.resources = SimpleNamespace(engine_dead=False)
    client.outputs_queue = asyncio.Queue()
    attach_scheduler(client)
    return client, Wire(client)


def counts(*ranks: tuple[int, int]) -> list[list[Any]]:
    """What the coordinator sends of ranks with so many requests that wait and run, by its form."""
    from vllm.v1.engine.coordinator import EngineState

    return [[*two, *EngineState().request_counts[len(two) :]] for two in ranks]


def engine_request(name: str, size: int = 4, rank: int | None = None, more: bool = False) -> Any:
    """A request; with `more` a part of an input that is streamed, and not the last one."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1] * size,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=rank,
        external_req_id=name,
        resumable=more,
    )


async def step(client: Any, tokens: dict[str, int], finished: set[str]) -> None:
    """What an engine says of a step."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    outputs = [EngineCoreOutput(name, [1] * count) for name, count in tokens.items()]
    outputs_of_step = EngineCoreOutputs(outputs=outputs, finished_requests=finished)
    await type(client).process_engine_outputs(client, outputs_of_step)
    for _ in range(4):
        await asyncio.sleep(0)


async def held() -> None:
    """A held request goes out as the engine's client would send it."""
    client, wire = make_client(1, "fit")
    for name in ("a", "b", "late"):
        await client.add_request_async(engine_request(name))
    assert wire.engines == [b"\0\0", b"\1\0"]
    client.current_wave, woken = 6, wire.woken
    await step(client, {"a": 1, "b": 3}, {"b"})
    assert wire.messages[2] == (b"\1\0", "ADD", ("late", 6)), "with the wave of the time"
    # Before 0.33 the client wakes the other engines; since then the one that gets a request does.
    assert wire.woken == (len(wire.messages) if woken else 0), "engines that pause are woken"
    assert client.reqs_in_flight == {"a": b"\0\0", "late": b"\1\0"}
    assert set(client.engine_inflight.values()) <= {1}


async def aborted() -> None:
    """An abort reaches the rank that has the request, and nobody where none has."""
    client, wire = make_client(1, {"policy": "fit"})
    for name in ("a", "b", "late"):
        await client.add_request_async(engine_request(name))
    await client.abort_requests_async(["late"])
    assert len(wire.messages) == 2
    await client.abort_requests_async(["b", "late", "unknown"])
    assert wire.messages[2:] == [(b"\1\0", "ABORT", (["b"], None))]
    await step(client, {}, {"a", "b"})
    assert len(wire.messages) == 3
    assert set(client.engine_inflight.values()) <= {0}
    assert client.equipoise_scheduler.requests == ()


async def pinned() -> None:
    """A rank that is asked for is kept to."""
    client, wire = make_client(1, "jsq_load")
    for name in ("a", "b"):
        await client.add_request_async(engine_request(name, rank=1))
    assert wire.engines == [b"\1\0"], "the other waits for it"
    await step(client, {"a": 1}, {"a"})
    assert wire.engines == [b"\1\0"] * 2


async def streamed() -> None:
    """Parts of an input follow the first one, wherever it is less crowded meanwhile."""
    client, wire = make_client(8, "round_robin")
    await client.add_request_async(engine_request("elsewhere"))
    await client.add_request_async(engine_request("long", more=True))
    client.lb_engines = counts((0, 0), (7, 9))
    for more in (True, False):
        await client.add_request_async(engine_request("long", more=more))
    assert wire.engines == [b"\0\0", b"\1\0", b"\1\0", b"\1\0"]


async def reported() -> None:
    """Reports are read in the form in which this version has them."""
    client, _ = make_client(8, "fit")
    kind = type(client.equipoise_scheduler.policy)
    own = kind.on_worker_change
    with patch.object(kind, "on_worker_change", autospec=True, side_effect=own) as on_change:
        client.lb_engines = counts((2, 1), (0, 3))
        client.equipoise_scheduler.poll()
    reports = [call.args[1].report for call in on_change.call_args_list]
    assert [(one.waiting, one.running) for one in reports] == [(2, 1), (0, 3)]


async def ended() -> None:
    """The engine's front end takes an end that we made for one of its own."""
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    client, _ = make_client(1, "fit")
    processor = OutputProcessor(None, log_stats=False)
    waiting = {}
    for name in ("a", "b", "late"):
        request = engine_request(name)
        kind = request.sampling_params.output_kind
        waiting[name] = RequestOutputCollector(kind, name)
        processor.add_request(request, None, None, 0, waiting[name])
        await client.add_request_async(request)
    client.equipoise_scheduler.abort_queued()
    queued = client.outputs_queue.get_nowait()
    processor.process_outputs(queued.outputs, queued.timestamp)
    output = waiting["late"].get_nowait()
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert waiting["a"].get_nowait() is None
    assert processor.get_num_unfinished_requests() == 2


async def shared() -> None:
    """A slot that one API server's request leaves goes to what waits at another one."""
    with TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        (first, first_wire), (second, second_wire) = [
            make_client(1, "fit", 2, server) for server in (0, 1)
        ]
        await first.add_request_async(engine_request("a"))
        await first.add_request_async(engine_request("b"))
        await until(lambda: len(first_wire.engines) == 2)
        await second.add_request_async(engine_request("late"))
        assert second_wire.engines == []
        await step(first, {"a": 1, "b": 1}, {"b"})
        await until(lambda: second_wire.engines)
        assert second_wire.engines == [first_wire.engines[1]]
        for client in (first, second):
            client.equipoise_scheduler.close()


async def until(condition: Callable[[], object]) -> None:
    """Wait for what comes from a socket; `perform` bounds it."""
    while not condition():
        await asyncio.sleep(0.001)


async def taken_out() -> None:
    """What is put in is put in once, and taken out without a trace."""
    from vllm.v1.engine import core_client

    ours = core_client.DPLBAsyncMPClient
    assert apply_patches([CLIENT_PATCH]) == ()
    undo_patches([CLIENT_PATCH])
    assert ours.__bases__ == (core_client.DPLBAsyncMPClient,)


PLAYS: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = {
    play.__name__: play
    for play in (held, aborted, pinned, streamed, shared, reported, ended, taken_out)
}


def perform(name: str) -> None:
    """Put our part into the client's class, and play; raises what does."""
    apply_patches([CLIENT_PATCH])
    try:
        run(PLAYS[name]())
    finally:
        undo_patches([CLIENT_PATCH])
