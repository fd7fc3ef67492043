"""Where endpoints come from: a file that changes, a name in DNS."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes.failing_policies import TwoWorkers
from helpers.fakes.fake_openai_server import Fake, start
from helpers.harnesses.picker_setup import picking, run

from equipoise.balancer.requests.policy import WorkerState
from equipoise.cli.picker import read_endpoints
from equipoise.serve.picker import endpoint_list
from equipoise.serve.picker.endpoint_list import first_endpoints, follow_endpoints
from equipoise.serve.picker.endpoint_pool import EndpointPool
from equipoise.serve.picker.settings import DnsEndpoints, EndpointsFile, PickerSettings

QUICK = 0.02


def source_of(path: Path) -> EndpointsFile:
    return EndpointsFile(path=path, read=lambda path: read_endpoints(path, 4, None), interval=QUICK)


def write(path: Path, *fakes: Fake) -> None:
    """As Kubernetes does: a whole new file in the place of the old one."""
    listed = "".join(f"- http://127.0.0.1:{one.port}\n" for one in fakes)
    new = path.with_suffix(".new")
    new.write_text(f"workers:\n{listed}" if fakes else "workers: []\n")
    new.replace(path)


def test_file_that_changes_adds_and_removes_endpoints(tmp_path: Path) -> None:
    async def work() -> None:
        path = tmp_path / "endpoints.yaml"
        one, other = Fake("w0"), Fake("w1")
        runners = [await start(one), await start(other)]
        write(path)
        async with picking(endpoints=source_of(path)) as setup:
            assert setup.pool.endpoints == ()
            write(path, one)
            await setup.until(lambda: setup.pool.serving == 1)
            assert (await setup.send()).served == f"127.0.0.1:{one.port}"
            write(path, other)
            await setup.until(lambda: setup.state_of(f"127.0.0.1:{one.port}") is None)
            await setup.until(lambda: setup.pool.serving == 1)
            assert (await setup.send()).served == f"127.0.0.1:{other.port}"
        for runner in runners:
            await runner.cleanup()

    run(work())


def test_endpoint_that_the_policy_does_not_take_is_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        path = tmp_path / "endpoints.yaml"
        write(path, *(Fake(f"w{n}", port=n) for n in (1, 2, 3)))
        source = source_of(path)
        pool = EndpointPool(
            lambda slots, kv_tokens: TwoWorkers(slots, kv_tokens), PickerSettings(endpoints=source)
        )
        follower = asyncio.create_task(follow_endpoints(source, pool))
        while "127.0.0.1:3: not added: the policy does not take worker 2" not in caplog.text:
            await asyncio.sleep(QUICK)
        assert pool.dispatcher.policy_errors == 1
        assert [one.address for one in pool.endpoints] == ["127.0.0.1:1", "127.0.0.1:2"]
        write(path, Fake("w4", port=4))
        while [one.address for one in pool.endpoints] != ["127.0.0.1:4"]:
            await asyncio.sleep(QUICK)
        follower.cancel()
        pool.close()

    run(work())


@pytest.mark.parametrize(
    "text", ["workers: [a:1]", "workers: [", "workers:", "wrong: 1", "\0", "", "\n# none\n", None]
)
def test_file_with_a_mistake_changes_nothing(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        path = tmp_path / "endpoints.yaml"
        fake = Fake("w0")
        runner = await start(fake)
        write(path, fake)
        async with picking(endpoints=source_of(path)) as setup:
            await setup.until(lambda: setup.pool.serving == 1)
            if text is None:
                path.unlink()
            else:
                path.write_text(text)
            await setup.until(lambda: "stays as it is" in caplog.text)
            await asyncio.sleep(QUICK * 5)
            assert caplog.text.count("stays as it is") == 1
            assert (await setup.send()).status == 200
            write(path, fake)  # and it is read again when it is well
            await setup.until(lambda: setup.pool.serving == 1)
        await runner.cleanup()

    run(work())


def answer_names(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    """The resolver of the running loop gives these answers, one after the other."""

    async def resolve(_loop: object, name: str, *_: object, **__: object) -> Any:
        assert name == "workers"
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, 0, 0, "", (address, 0)) for address in answer]

    monkeypatch.setattr(asyncio.get_running_loop().__class__, "getaddrinfo", resolve)


def test_name_has_an_endpoint_for_each_address_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        answers: list[Any] = [["10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1"], OSError("no name")]

        answer_names(monkeypatch, answers)
        source = DnsEndpoints(name="workers", ports=(8000, 8001), slots=3, kv_tokens=9)
        workers = await first_endpoints(source)
        assert [one.url for one in workers] == [
            "http://10.0.0.1:8000",
            "http://10.0.0.1:8001",
            "http://10.0.0.2:8000",
            "http://10.0.0.2:8001",
            "http://[fd00::1]:8000",
            "http://[fd00::1]:8001",
        ]
        assert {(one.slots, one.kv_tokens) for one in workers} == {(3, 9)}
        assert (
            await first_endpoints(source) == ()
        )  # a name without an answer has none to begin with

    run(work())


def test_address_with_a_zone_is_no_endpoint_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        local = "fe80::1%eth0"
        answer_names(monkeypatch, [[local, "fe80::1"], [local, "10.0.0.1"], [local]])
        source = DnsEndpoints(name="workers", ports=(8000,))
        answers = [await endpoint_list._resolved(source) for _ in range(3)]
        urls = [None if one is None else [each.url for each in one] for one in answers]
        # Where no other is left the endpoints stay as they are.
        assert urls == [["http://[fe80::1]:8000"], ["http://10.0.0.1:8000"], None]
        assert caplog.text.count(f"workers: {local} is no endpoint") == 1

    run(work())


def test_name_that_no_resolver_takes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    source = DnsEndpoints(name="bad..name", ports=(8000,))
    assert run(first_endpoints(source)) == ()
    assert "bad..name is not resolved, the endpoints stay" in caplog.text


def test_name_without_an_answer_keeps_its_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        fake = Fake("w0")
        runner = await start(fake)
        source = DnsEndpoints(name="localhost", ports=(fake.port,), slots=4, interval=QUICK)
        known = await first_endpoints(source)
        monkeypatch.setattr(endpoint_list, "_resolved", resolver([known[:1], None, None, ()]))
        async with picking(endpoints=source) as setup:
            await setup.until(lambda: setup.pool.serving == 1)
            await asyncio.sleep(QUICK * 2)
            name = setup.pool.endpoints[0].settings.name
            assert setup.state_of(name) is WorkerState.SERVING
            await setup.until(lambda: setup.state_of(name) is None)
        await runner.cleanup()

    run(work())


def resolver(answers: list[Any]) -> Any:
    async def resolved(_source: DnsEndpoints) -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    return resolved
