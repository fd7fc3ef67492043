"""The process of a policy server: its pages, its start and its end."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import pytest
from helpers.event_loop import PATIENCE, in_event_loop
from helpers.fakes.failing_policies import FixedWorkers, UnknownWorkerPolicy
from helpers.fakes.late_binding_policy import LateBinding
from helpers.harnesses.picker_setup import ANY_PORT
from helpers.harnesses.proxy_setup import settings_of
from prometheus_client.parser import text_string_to_metric_families

from equipoise.balancer.requests.policy import Decision, RoutingPolicy, WorkerChange
from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.balancer.requests.policy_messages import VERSION
from equipoise.hal.errors import EquipoiseError, UsageError
from equipoise.serve.picker.server import serve_picker
from equipoise.serve.picker.settings import PickerSettings, StaticEndpoints
from equipoise.serve.policy_process import PolicyProcess, PolicyServerSettings, serve_policy
from equipoise.serve.server import serve
from equipoise.serve.settings import AccessSettings, PolicyServerAddress, WorkerSettings

ANY = PolicyServerSettings(port=0, metrics_port=0)
WORKER = WorkerSettings(url="http://127.0.0.1:1", name="w")
ADDRESS = PolicyServerAddress("127.0.0.1", 1)
LATE_BINDING = cast(PolicyFactory, LateBinding)
HELLO = ["hello", VERSION, None]


@dataclass
class Peer:
    """A front end, by hand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *messages: Sequence[object]) -> None:
        """Send them, and wait until the last one is acknowledged."""
        for message in messages:
            self.writer.write(json.dumps(message).encode() + b"\n")
        while json.loads(await self.reader.readline())[1] < len(messages):
            pass


@asynccontextmanager
async def peers(process: PolicyProcess, number: int) -> AsyncIterator[list[Peer]]:
    connected = [
        Peer(*await asyncio.open_connection("127.0.0.1", process.ports["port"]))
        for _ in range(number)
    ]
    try:
        yield connected
    finally:
        for one in connected:
            one.writer.close()


@asynccontextmanager
async def policy_served(factory: PolicyFactory = LATE_BINDING) -> AsyncIterator[PolicyProcess]:
    process = PolicyProcess(factory)
    try:
        await process.start(ANY)
        yield process
    finally:
        await process.stop()


async def page(process: PolicyProcess, path: str) -> str:
    url = f"http://127.0.0.1:{process.ports['metrics_port']}{path}"
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


async def samples(process: PolicyProcess) -> dict[tuple[str, ...], float]:
    """By name and values of labels."""
    families = text_string_to_metric_families(await page(process, "/metrics"))
    return {
        (sample.name.removeprefix("equipoise_policy_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@in_event_loop
async def test_pages_say_what_front_ends_have() -> None:
    async with policy_served() as process, peers(process, 2) as (first, second):
        assert json.loads(await page(process, "/ready")) == {"front_ends": 0}
        assert json.loads(await page(process, "/workers")) == {"front_ends": 0, "workers": []}
        await first.send(
            HELLO,
            ["worker", 0, "http://a", 2, 100, "serving"],
            ["worker", 1, "http://b", None, None, "serving"],
            ["running", 0, 5, None, 0, 3],
        )
        await second.send(
            HELLO,
            ["worker", 0, "http://a", 1, None, "serving"],
            ["worker", 1, "http://b", 1, None, "lost"],
            ["arrive", 0, 5, 0, None, None],
            ["arrive", 1, 5, 1, None, None],
        )
        assert json.loads(await page(process, "/ready")) == {"front_ends": 2}
        assert json.loads(await page(process, "/health")) == {"status": "ok"}
        a = {"name": "http://a", "state": "serving", "slots": 1, "kv_tokens": 100}
        b = {"name": "http://b", "state": "serving", "slots": None, "kv_tokens": None}
        assert json.loads(await page(process, "/workers")) == {
            "front_ends": 2,
            "workers": [
                {**a, "known_to": 2, "used_by": 2, "requests": 1},
                {**b, "known_to": 2, "used_by": 1, "requests": 0},
            ],
        }


@in_event_loop
async def test_metrics_count_front_ends_workers_and_requests_by_stage() -> None:
    async with policy_served() as process, peers(process, 2) as (first, second):
        await first.send(HELLO, ["worker", 0, "http://a", 2, None, "serving"])
        await second.send(
            HELLO,
            ["worker", 0, "http://a", 2, None, "serving"],
            ["worker", 1, "http://b", 2, None, "draining"],
            ["running", 0, 5, None, 0, 3],
            ["arrive", 1, 5, 0, None, None],
            ["arrive", 2, 5, 0, None, None],
            ["arrive", 3, 5, 1, None, None],
        )
        values = await samples(process)
        assert values[("front_ends",)] == 2
        stages = ("parked", "pooled", "bound", "running")
        assert [values["requests", one] for one in stages] == [1, 1, 1, 1]
        states = ("serving", "draining", "lost")
        assert [values["workers", one] for one in states] == [1, 1, 0]
        assert values[("partly_used_workers",)] == 0
        assert values[("prompt_weight",)] == 0
        assert values[("process_cpu_seconds_total",)] > 0
        await second.send(["state", 1, "serving", 9])
        assert (await samples(process))[("partly_used_workers",)] == 1


@in_event_loop
async def test_metrics_have_the_weight_of_prompts_of_the_policy() -> None:
    async with policy_served(routing_policy_factory("fit", {"prompt_weight": 200})) as process:
        assert (await samples(process))[("prompt_weight",)] == 200


@pytest.mark.parametrize("flag", ["port", "metrics_port"])
def test_port_in_use_is_a_usage_error_that_names_the_option(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ports = {"port": 0, "metrics_port": 0, flag: port}
        with pytest.raises(UsageError) as error:
            serve_policy(PolicyServerSettings(**ports), LATE_BINDING, print)
    option = f"--host 127.0.0.1 --{flag.replace('_', '-')} {port}: "
    assert str(error.value).startswith(option)
    assert "address already in use" in str(error.value)


LISTENERS: dict[str, Callable[[str], object]] = {
    "policy-server": lambda host: serve_policy(
        PolicyServerSettings(host=host), LATE_BINDING, print
    ),
    "route": lambda host: serve(
        settings_of([], workers=(WORKER,), access=AccessSettings(host=host)), LATE_BINDING, print
    ),
}


@pytest.mark.parametrize("server", LISTENERS)
def test_host_that_no_resolver_takes_is_a_usage_error(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"--host a\.\.b .* label empty or too long"):
        LISTENERS[server]("a..b")
    assert not caplog.records, "nobody has joined or left"


@contextmanager
def noting(work: Callable[[int], Any]) -> Iterator[tuple[list[str], Callable[[str], None]]]:
    """Lines of a policy server; with the first one `work` begins, with its port."""
    lines: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def bounded(port: int) -> None:
        async with asyncio.timeout(PATIENCE):
            await work(port)

    def say(line: str) -> None:
        lines.append(line)
        port = int(line.removeprefix("policy on port ").partition(",")[0])
        tasks.append(asyncio.get_running_loop().create_task(bounded(port)))

    yield lines, say
    [task] = tasks
    assert task.done()
    assert task.cancelled() or task.exception() is None


def test_policy_server_ends_by_a_signal_with_code_0() -> None:
    async def end(port: int) -> None:
        del port
        os.kill(os.getpid(), signal.SIGTERM)

    with noting(end) as (lines, say):
        assert serve_policy(ANY, LATE_BINDING, say) == 0
    [line] = lines
    assert ", metrics on " in line


def test_policy_that_fails_ends_the_server_with_an_error() -> None:
    async def arrive(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        worker = ["worker", 0, "http://a", 1, None, "serving"]
        for message in (HELLO, worker, ["arrive", 0, 5, None, None, None]):
            writer.write(json.dumps(message).encode() + b"\n")
        await reader.read()
        writer.close()

    with (
        noting(arrive) as (_, say),
        pytest.raises(EquipoiseError, match="the policy failed: see above") as error,
    ):
        serve_policy(ANY, cast(PolicyFactory, UnknownWorkerPolicy), say)
    assert not isinstance(error.value, UsageError)


class TakesNothingOver:
    """A policy that takes new workers, and no requests that run."""

    def __init__(self, slots: Sequence[int], kv_tokens: Sequence[int | None]) -> None:
        del slots, kv_tokens

    def on_worker_change(self, change: WorkerChange) -> Decision:
        del change
        return Decision()


class DerivesFromTheProtocol(TakesNothingOver, RoutingPolicy):
    """What it lacks does nothing."""


SERVERS: dict[str, Callable[[Any], object]] = {
    "policy-server": lambda factory: serve_policy(ANY, factory, print),
    "route": lambda factory: serve(
        settings_of([], workers=(WORKER,), policy_server=ADDRESS),
        factory,
        print,
    ),
    "picker": lambda factory: serve_picker(
        PickerSettings(
            endpoints=StaticEndpoints(workers=()), ports=ANY_PORT, policy_server=ADDRESS
        ),
        factory,
        print,
    ),
}


@pytest.mark.parametrize("policy", [TakesNothingOver, DerivesFromTheProtocol])
@pytest.mark.parametrize("server", SERVERS)
def test_policy_without_on_running_is_refused_at_the_start(server: str, policy: Any) -> None:
    with pytest.raises(UsageError, match=r"--policy: .* needs a method `on_running`"):
        SERVERS[server](policy)


def test_policy_that_takes_no_new_worker_is_refused_by_the_server() -> None:
    with pytest.raises(UsageError, match="--policy: it takes no new worker: IndexError: worker 1"):
        serve_policy(ANY, cast(PolicyFactory, FixedWorkers), print)
