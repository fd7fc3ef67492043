"""The port of Envoy with TLS; that of health checks without, as Kubernetes asks."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.fakes.fake_openai_server import Fake
from helpers.harnesses.picker_setup import ANY_PORT, picking, run
from helpers.processes.certificate import make_certificate

from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.hal.errors import UsageError
from equipoise.serve.picker.server import Picker
from equipoise.serve.picker.settings import PickerSettings, StaticEndpoints


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_picker_answers_over_tls_and_health_without(certificate: Path) -> None:
    async def work() -> None:
        ports = replace(
            ANY_PORT, certificate=certificate, private_key=certificate.with_name("key.pem")
        )
        async with picking(Fake("w0"), ports=ports) as setup:
            assert (await setup.send()).status == 200
            address = f"127.0.0.1:{setup.picker.ports['health']}"
            async with grpc.aio.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                reply = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
                assert reply.status == health_pb2.HealthCheckResponse.SERVING

    run(work())


def test_picker_refuses_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    async def work() -> None:
        bad = tmp_path / "bad.pem"
        bad.write_text("no certificate")
        settings = PickerSettings(
            endpoints=StaticEndpoints(workers=()), ports=replace(ANY_PORT, certificate=bad)
        )
        async with asyncio.TaskGroup() as tasks:
            picker = Picker(settings, routing_policy_factory("fit", {}), tasks)
            try:
                with pytest.raises(UsageError, match=r"--tls-cert .*bad\.pem"):
                    await picker.start()
            finally:
                await picker.close()

    run(work())


def test_two_pickers_do_not_share_a_port() -> None:
    async def work() -> None:
        async with picking(Fake("w0")) as setup:
            ports = replace(ANY_PORT, grpc=setup.picker.ports["grpc"])
            settings = PickerSettings(endpoints=StaticEndpoints(workers=()), ports=ports)
            async with asyncio.TaskGroup() as tasks:
                picker = Picker(settings, routing_policy_factory("fit", {}), tasks)
                try:
                    with pytest.raises(UsageError, match=f"--port {ports.grpc}"):
                        await picker.start()
                finally:
                    await picker.close()

    run(work())
