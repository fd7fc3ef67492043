"""API keys in either header, TLS by a certificate of one's own, and files that cannot be taken."""

import json
import os
import ssl
from pathlib import Path

import aiohttp
import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.proxy_setup import CHAT, chat_request, proxied, run, tokens_of
from helpers.processes.certificate import make_certificate

from equipoise.hal.errors import UsageError
from equipoise.serve.auth import open_to_all, tls_context
from equipoise.serve.openai_protocol import MESSAGES
from equipoise.serve.settings import AccessSettings


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_proxy_serves_clients_over_tls(certificate: Path) -> None:
    async def work() -> None:
        access = AccessSettings(
            certificate=certificate, private_key=certificate.with_name("key.pem")
        )
        trust = ssl.create_default_context(cafile=str(certificate))
        async with (
            proxied(Fake("w0"), access=access) as setup,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as client,
            client.post(setup.url + CHAT, json=chat_request(2, stream=True)) as answer,
        ):
            assert setup.url.startswith("https://")
            assert tokens_of(await answer.read()) == ["w0:0 ", "w0:1 "]

    run(work())


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_proxy_takes_key_in_either_header_and_passes_neither_on(path: str) -> None:
    sent_headers = [{"X-Api-Key": "two"}, {"Authorization": "Bearer two"},
                    {"X-Api-Key": "two", "Authorization": "Basic other"},
                    {"X-Api-Key": "other", "Authorization": "Bearer two"}]  # fmt: skip

    async def work() -> None:
        access = AccessSettings(keys=("one", "two"), worker_key="theirs")
        async with proxied(fake := Fake("w0"), access=access) as setup:
            for headers in sent_headers:
                assert (await setup.post(chat_request(1), path, **headers)).status == 200
            seen = [one["headers"] for one in fake.events("begin")]
            assert [one["authorization"] for one in seen] == ["Bearer theirs"] * len(sent_headers)
            assert not any("x-api-key" in one for one in seen)

    run(work())


@pytest.mark.parametrize("key", ["", "tw", "two2", "Bearer two", "\xff"])
def test_proxy_refuses_wrong_key_in_anthropics_header(key: str) -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0"), access=AccessSettings(keys=("one", "two"))) as setup:
            for path, shape in ((CHAT, ["error"]), (MESSAGES, ["type", "error"])):
                answer = await setup.post(chat_request(), path, X_Api_Key=key)
                assert (answer.status, answer.error["type"]) == (401, "authentication_error")
                assert list(json.loads(answer.body)) == shape
            assert fake.events("begin") == []

    run(work())


def test_proxy_forwards_clients_x_api_key_without_own_key() -> None:
    async def work() -> None:
        async with proxied(fake := Fake("w0")) as setup:
            await setup.post(chat_request(1), X_Api_Key="clients")
            [begin_event] = fake.events("begin")
            assert begin_event["headers"]["x-api-key"] == "clients"

    run(work())


@pytest.mark.parametrize("key_too", [False, True])
def test_tls_refuses_a_pipe(certificate: Path, tmp_path: Path, key_too: bool) -> None:
    """OpenSSL would wait for a writer, deaf to signals."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    access = AccessSettings(
        certificate=certificate if key_too else pipe, private_key=pipe if key_too else None
    )
    flag = "--tls-key" if key_too else "--tls-cert"
    with pytest.raises(UsageError, match=f"{flag} .*is a pipe, not a file"):
        tls_context(access)


def test_tls_rejects_missing_or_invalid_certificate(certificate: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "none.pem"
    with pytest.raises(UsageError, match=r"--tls-cert .*none.pem: No such file"):
        tls_context(AccessSettings(certificate=nothing))
    nothing.write_text("hello")
    with pytest.raises(UsageError, match=r"none\.pem"):
        tls_context(AccessSettings(certificate=nothing))
    with pytest.raises(UsageError, match=r"cert\.pem"):
        tls_context(AccessSettings(certificate=certificate))  # its key is elsewhere


@pytest.mark.parametrize(
    ("host", "keys", "open_"),
    [
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("0.0.0.0", ("k",), False),
    ],
)
def test_open_to_all_detects_public_host_without_keys(
    host: str, keys: tuple[str, ...], open_: bool
) -> None:
    assert open_to_all(AccessSettings(host=host, keys=keys)) is open_
