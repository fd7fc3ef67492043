"""Many requests through a picker, while a server is killed, comes back, and another is added."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes.fake_envoy import BodyModes, EnvoyAnswer
from helpers.fakes.fake_server_process import FakeProcess, events_of
from helpers.harnesses.picker_setup import PickerSetup, picking
from helpers.harnesses.proxy_setup import tokens_of
from helpers.processes.proxy_load import (
    DOOMED,
    REQUESTS,
    SLOTS,
    TOKENS,
    WATCHDOG,
    Load,
    attempts_of,
    three_servers,
)
from helpers.tiers import DEEP

from equipoise.balancer.requests.policy import WorkerState
from equipoise.cli.picker import endpoints_of
from equipoise.serve.picker.settings import (
    EndpointsFile,
    PickerLimits,
    TokenSource,
)
from equipoise.serve.settings import HealthSettings, WorkerSettings

pytestmark = pytest.mark.timeout(1000 if DEEP else 300)
LATE = "w2"
"""The server that is added in the middle."""
MODES = [
    BodyModes(),
    pytest.param(BodyModes("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"), marks=pytest.mark.deep),
]


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeProcess]]:
    with three_servers(tmp_path) as servers:
        yield servers


def read_list(path: Path) -> tuple[WorkerSettings, ...]:
    return endpoints_of(json.loads(path.read_text()), SLOTS, None)


@pytest.mark.parametrize("modes", MODES, ids=lambda modes: modes.response.lower())
def test_picker_loses_no_request_that_had_no_answer(
    fakes: list[FakeProcess], tmp_path: Path, modes: BodyModes
) -> None:
    path = tmp_path / "endpoints.json"
    entries = [{"url": f"http://127.0.0.1:{one.port}", "name": one.name} for one in fakes]
    path.write_text(json.dumps([one for one in entries if one["name"] != LATE]))
    answers: dict[str, EnvoyAnswer] = {}

    async def work() -> None:
        chunks = modes.response != "NONE"
        async with (
            asyncio.timeout(WATCHDOG),
            picking(
                modes=modes,
                endpoints=EndpointsFile(path=path, read=read_list, interval=0.1),
                limits=PickerLimits(queued=10_000),
                health=HealthSettings(interval=0.5),
                tokens=TokenSource.CHUNKS if chunks else TokenSource.NONE,
            ) as setup,
        ):
            load = Load(asking(setup), fakes[1], lambda: serves(setup, DOOMED))
            adding = asyncio.create_task(add_late(load))
            await load.run()
            await adding
            assert serves(setup, LATE)

    def asking(setup: PickerSetup) -> Callable[[int], Awaitable[None]]:
        async def ask(number: int) -> None:
            name = f"r{number}"
            body = {"model": "m", "prompt": "even?", "max_tokens": TOKENS, "stream": True}
            answers[name] = await setup.envoy.send(
                json.dumps(body).encode(), headers={"x-request-id": name}
            )

        return ask

    async def add_late(load: Load) -> None:
        while load.ended < REQUESTS // 3:
            await asyncio.sleep(0.02)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(entries))
        new.replace(path)

    asyncio.run(work())
    events = events_of(fakes)
    assert set(answers) == {f"r{number}" for number in range(REQUESTS)}
    kinds = Counter(judge(answers[name], events[name]) for name in answers)
    # What broke off is what the server had when it was killed.
    assert kinds["broken"] <= SLOTS
    assert kinds["whole"] == REQUESTS - kinds["broken"]
    assert {one["worker"] for each in events.values() for one in each} == {"w0", DOOMED, LATE}


def judge(answer: EnvoyAnswer, events: list[dict[str, Any]]) -> str:
    attempts = attempts_of(events)
    # A request whose answer had begun was sent to nobody else.
    begun = [one for one in attempts if one.tokens]
    assert len(begun) <= 1
    assert answer.status == 200, answer
    if answer.broken:
        assert attempts[-1].worker == DOOMED
        assert not attempts[-1].ended or not answer.body.endswith(b"[DONE]\n\n")
        return "broken"
    [attempt] = begun
    assert attempt is attempts[-1]
    assert attempt.ended
    assert tokens_of(answer.body) == [f"{attempt.worker}:{n} " for n in range(TOKENS)]
    return "whole"


def serves(setup: PickerSetup, name: str) -> bool:
    return setup.state_of(name) is WorkerState.SERVING
