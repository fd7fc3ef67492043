"""vLLM's own client, with our part in it, without engines: its books, its messages, its outputs."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.request_play import run

# What vLLM imports warns of what will be deprecated.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def client_class() -> Iterator[Any]:
    """The class, with our part in it until the test ends."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    from equipoise.integrations.vllm import compatibility, requests_part
    from equipoise.integrations.vllm.patching import apply, undo

    compatibility.check(["routing"])
    apply(requests_part.PATCHES)
    yield DPLBAsyncMPClient
    undo(requests_part.PATCHES)


class Wire:
    """What a client sends, in the place of its sockets."""

    def __init__(self, client: Any) -> None:
        self.sent: list[tuple[bytes, str, Any]] = []
        client._send_input = self.send_input
        client._ensure_stats_update_task = client._ensure_output_queue_task = lambda: None
        client.first_req_send_socket = SimpleNamespace(send=self.first)
        self.woken = 0

    def send_input(self, kind: Any, request: Any, engine: bytes) -> asyncio.Future[None]:
        wave = getattr(request, "current_wave", None)
        self.sent.append((engine, kind.name, (getattr(request, "request_id", request), wave)))
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    async def first(self, message: bytes) -> None:
        self.woken += 1


def made(kind: Any, slots: int, routing: Any) -> tuple[Any, Wire]:
    """A client that has met two engines."""
    from equipoise.integrations.vllm.requests_part import attach

    client = object.__new__(kind)
    client.vllm_config = SimpleNamespace(
        additional_config={"equipoise": {"routing": routing}},
        cache_config=SimpleNamespace(
            kv_cache_size_tokens=4096, num_gpu_blocks=512, block_size=16, enable_prefix_caching=True
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=slots),
    )
    client.client_count, client.client_index, client.current_wave = 1, 0, 5
    client.core_engines, client.engine_ranks_managed = [b"\0\0", b"\1\0"], [0, 1]
    client.lb_engines = [[0, 0, 0.0], [0, 0, 0.0]]
    client.reqs_in_flight, client.engine_inflight = {}, Counter()
    client.eng_start_index, client.engines_running = 0, False
    client.resources = SimpleNamespace(engine_dead=False)
    client.outputs_queue = asyncio.Queue()
    attach(client)
    return client, Wire(client)


def asked(name: str, size: int = 4, rank: int | None = None) -> Any:
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
    )


async def step(client: Any, tokens: dict[str, int], finished: set[str]) -> None:
    """What an engine says of a step."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    outputs = [EngineCoreOutput(name, [1] * count) for name, count in tokens.items()]
    told = EngineCoreOutputs(outputs=outputs, finished_requests=finished)
    await type(client).process_engine_outputs(client, told)
    for _ in range(4):
        await asyncio.sleep(0)


def test_a_held_request_goes_out_as_the_engines_client_would_send_it(client_class: Any) -> None:
    async def work() -> None:
        client, wire = made(client_class, 1, "fit")
        for name in ("a", "b", "late"):
            await client.add_request_async(asked(name))
        assert [engine for engine, _, _ in wire.sent] == [b"\0\0", b"\1\0"]
        client.current_wave, woken = 6, wire.woken
        await step(client, {"b": 3}, {"b"})
        assert wire.sent[2] == (b"\1\0", "ADD", ("late", 6)), "with the wave of the time"
        assert wire.woken == woken + 1, "engines that pause are woken"
        assert client.reqs_in_flight == {"a": b"\0\0", "late": b"\1\0"}
        assert client.engine_inflight == {b"\0\0": 1, b"\1\0": 1}

    run(work())


def test_an_abort_reaches_the_rank_that_has_it_and_nobody_where_none_has(client_class: Any) -> None:
    async def work() -> None:
        client, wire = made(client_class, 1, {"policy": "fit"})
        for name in ("a", "b", "late"):
            await client.add_request_async(asked(name))
        await client.abort_requests_async(["late"])
        assert len(wire.sent) == 2
        await client.abort_requests_async(["b", "late", "unknown"])
        assert wire.sent[2:] == [(b"\1\0", "ABORT", (["b"], None))]
        await step(client, {}, {"a", "b"})
        assert len(wire.sent) == 3
        assert set(client.engine_inflight.values()) == {0}
        assert client.equipoise_desk.tickets == ()

    run(work())


def test_a_rank_that_is_asked_for_is_kept_to(client_class: Any) -> None:
    async def work() -> None:
        client, wire = made(client_class, 1, "jsq_load")
        for name in ("a", "b"):
            await client.add_request_async(asked(name, rank=1))
        assert [engine for engine, _, _ in wire.sent] == [b"\1\0"], "the other waits for it"
        await step(client, {"a": 1}, {"a"})
        assert [engine for engine, _, _ in wire.sent] == [b"\1\0"] * 2

    run(work())


def test_the_engines_front_end_takes_an_end_that_we_made_for_one_of_its_own(
    client_class: Any,
) -> None:
    async def work() -> None:
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

        client, _ = made(client_class, 1, "fit")
        processor = OutputProcessor(None, log_stats=False)
        waiting = {}
        for name in ("a", "b", "late"):
            request = asked(name)
            kind = request.sampling_params.output_kind
            waiting[name] = RequestOutputCollector(kind, name)
            processor.add_request(request, None, None, 0, waiting[name])
            await client.add_request_async(request)
        client.equipoise_desk.end_held()
        told = client.outputs_queue.get_nowait()
        processor.process_outputs(told.outputs, told.timestamp)
        ended = waiting["late"].get_nowait()
        assert ended.finished
        assert ended.outputs[0].finish_reason == "abort"
        assert waiting["a"].get_nowait() is None
        assert processor.get_num_unfinished_requests() == 2

    run(work())


def test_what_is_put_in_is_put_in_once_and_taken_out_without_a_trace(client_class: Any) -> None:
    from equipoise.integrations.vllm import compatibility, requests_part
    from equipoise.integrations.vllm.patching import MARK, apply, undo

    assert apply(requests_part.PATCHES) == ()
    compatibility.check(["routing"])
    undo(requests_part.PATCHES)
    names = [patch.attribute for patch in requests_part.PATCHES]
    assert not [name for name in names if hasattr(getattr(client_class, name), MARK)]
    compatibility.check(["routing"])
