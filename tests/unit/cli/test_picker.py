"""`equipoise picker`: its options, and what is wrong with them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_docs import refusal

from equipoise.balancer.requests.policy_factory import PolicyFactory, routing_policy_factory
from equipoise.cli.picker import COMMAND, PickerRequest, picker_settings, policy_of, read_endpoints
from equipoise.hal.errors import UsageError
from equipoise.serve import policy_process
from equipoise.serve.picker import server
from equipoise.serve.picker.settings import (
    DnsEndpoints,
    EndpointsFile,
    PickerPorts,
    PickerSettings,
    StaticEndpoints,
    TokenSource,
)
from equipoise.serve.policy_process import PolicyServerSettings

ONE = "workers: ['http://10.0.0.1:8000']\n"
BAD = {
    "slots: 3": "one of --workers, --endpoints-file, --endpoints-name is needed, got none",
    ONE + "endpoints_name: a": "is needed, got --workers and --endpoints-name",
    ONE + "endpoints_ports: '1'": "--endpoints-ports needs --endpoints-name",
    "endpoints_name: a\nendpoints_ports: '1,x'": "--endpoints-ports: expected ports such as",
    "endpoints_name: a\nendpoints_ports: '1,1'": "--endpoints-ports: expected ports such as",
    "endpoints_name: a\nendpoints_ports: '70000'": "--endpoints-ports: expected ports such as",
    "endpoints_name: a\nslots: 0": "slots has to be a whole number, 1 to",
    "endpoints_file: none.yaml": "none.yaml cannot be read",
    "workers: ['http://worker:8000']": "http://worker:8000 has to be http://IP:PORT",
    "workers: ['http://10.0.0.1:8000/v1']": "has to be http://IP:PORT",
    "workers: ['http://10.0.0.1']": "has to be http://IP:PORT",
    "workers: [{url: 'http://10.0.0.1:1', name: a}, {url: 'http://10.0.0.1:1', name: b}]": (
        "http://10.0.0.1:1 is there twice"
    ),
    ONE + "tokens: all": "expected chunks or metrics or none",
    ONE + "tokens: metrics": "--tokens metrics needs --metrics generated=NAME",
    ONE + "policy: vllm": "--policy vllm decides by reports of workers",
    ONE + "port: 70000": "--port must be 0 to 65535",
    ONE + "health_port: -1": "--health-port must be 0 to 65535",
    ONE + "fallbacks: 9": "--fallbacks must be 0 to 8, got 9",
    ONE + "fallbacks: -1": "--fallbacks must be 0 to 8, got -1",
    ONE + "queue_timeout: 0": "--queue-timeout must be above 0",
    ONE + "tls_key: k.pem": "--tls-key needs --tls-cert",
    ONE + "tls_cert: none.pem": "--tls-cert none.pem: No such file",
    ONE + "policy_options: {windw: 3}": "unknown option 'windw'",
    ONE + "sheddable: 'a,,b'": "--sheddable: expected names with commas between",
    ONE + "policy: helpers.fakes.failing_policies:FixedWorkers": (
        "--policy: it takes no new worker: IndexError: worker 1"
    ),
    ONE + "max_body: 1": "--max-body must be 1KiB to 2046MiB, got 1",
    ONE + "max_body: 3GiB": "--max-body must be 1KiB to 2046MiB, got 3221225472",
    ONE + "max_body: 2MiB\nmax_buffered: 1MiB": (
        "--max-buffered must be at least --max-body (2097152), got 1048576"
    ),
    "endpoints_name: bad..name": "--endpoints-name: expected a name of DNS",
    f"endpoints_name: {'a' * 64}.svc": "whose parts have 1 to 63 letters each",
    "workers: ['https://10.0.0.1:8000']": "has to be http://IP:PORT",
    "workers: ['http://[fe80::1%eth0]:8000']": "has to be http://IP:PORT",
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[PickerSettings]:
    """Settings that would be served."""
    seen: list[PickerSettings] = []

    def serve(settings: PickerSettings, *_: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(server, "serve_picker", serve)
    return seen


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=map(repr, BAD))
def test_picker_rejects_bad_config_with_one_line(
    equipoise: Callable[..., Any], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "picker.yaml").write_text(text)
    answer = equipoise("picker", "--config", "picker.yaml")
    assert answer.code == 2, answer.err
    line = answer.err.splitlines()[-1]
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert "Traceback" not in answer.err


def test_picker_command_line_overrides_config_file(
    equipoise: Callable[..., Any], tmp_path: Path, served: list[PickerSettings]
) -> None:
    (tmp_path / "picker.yaml").write_text(
        ONE + "slots: 16\nport: 7\nmax_queued: 0\nfallbacks: 0\ndrain_timeout: 0\nlost_after: 7\n"
        "metrics: {waiting: w, running: r, tokens: t, generated: g}\nsheddable: batch, eval\n"
    )
    line = ("--config", "picker.yaml", "--port", "8", "--health-timeout", "0.5")
    assert equipoise("picker", *line).code == 0
    [settings] = served
    assert isinstance(settings.endpoints, StaticEndpoints)
    [worker] = settings.endpoints.workers
    assert (worker.url, worker.slots) == ("http://10.0.0.1:8000", 16)
    assert (settings.ports.grpc, settings.ports.health) == (8, 9003)
    assert (settings.limits.queued, settings.limits.fallbacks) == (0, 0)
    assert (settings.timeouts.drain, settings.timeouts.queue) == (0.0, 60.0)
    assert (settings.health.lost_after, settings.health.timeout) == (7, 0.5)
    assert settings.sheddable == {"batch", "eval"}
    assert settings.tokens is TokenSource.METRICS
    assert settings.reports is not None
    assert settings.reports.names == ("w", "r", "t", "g")


def test_picker_takes_endpoints_of_a_file_and_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("workers: []")
    values = PickerRequest(endpoints_file=path, slots=5)
    settings = picker_settings(values)
    assert isinstance(settings.endpoints, EndpointsFile)
    assert settings.endpoints.read(path) == ()
    path.write_text(ONE)
    assert [one.slots for one in settings.endpoints.read(path)] == [5]
    values = PickerRequest(endpoints_name="workers", endpoints_ports="8000, 8001")
    source = picker_settings(values).endpoints
    assert isinstance(source, DnsEndpoints)
    assert (source.name, source.ports, source.slots) == ("workers", (8000, 8001), 256)


def test_picker_reads_no_other_key_of_an_endpoints_file(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE + "slots: 3")
    with pytest.raises(UsageError, match="unknown key 'slots'"):
        read_endpoints(path, 1, None)


@pytest.mark.parametrize("metrics", ["", "metrics: {waiting: w, running: r, tokens: t}"])
def test_picker_refuses_a_pipe_as_endpoints_file(
    equipoise: Callable[..., Any], tmp_path: Path, metrics: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "picker.yaml").write_text(f"endpoints_file: pipe\n{metrics}")
    answer = equipoise("picker", "--config", "picker.yaml")
    assert answer.code == 2
    assert "pipe is not a regular file" in answer.err.splitlines()[-1]


def test_policy_waits_for_steps_only_where_chunks_tell_of_them() -> None:
    assert policy_of(PickerRequest(), TokenSource.CHUNKS) == ("fit", {})
    assert policy_of(PickerRequest(), TokenSource.NONE) == ("fit", {"lockstep": False})
    values = PickerRequest(policy="br0", policy_options=(("lockstep", True),))
    assert policy_of(values, TokenSource.METRICS) == ("br0", {"lockstep": True})
    assert policy_of(PickerRequest(policy="mine:POLICY"), TokenSource.NONE) == ("mine:POLICY", {})


def test_picker_help_defaults_match_settings() -> None:
    settings = picker_settings(PickerRequest(workers=("http://10.0.0.1:8000",)))
    shown = {option.key: option.shown_default for option in COMMAND.options.values()}
    assert shown["queue_timeout"] == f"{settings.timeouts.queue:g}"
    assert shown["drain_timeout"] == f"{settings.timeouts.drain:g}"
    assert shown["max_queued"] == str(settings.limits.queued)
    assert shown["max_concurrency"] == str(settings.limits.concurrency)
    assert shown["max_body"] == f"{settings.limits.body >> 20}MiB"
    assert shown["max_buffered"] == f"{settings.limits.buffered >> 20}MiB"
    assert shown["fallbacks"] == str(settings.limits.fallbacks)
    assert shown["port"] == str(settings.ports.grpc)
    assert shown["metrics_port"] == str(settings.ports.http)
    assert shown["host"] == settings.ports.host


def kubernetes_objects(kind: str) -> dict[str, Any]:
    """Those of the example, by name."""
    example = Path(__file__).parents[3] / "examples" / "picker" / "kubernetes.yaml"
    objects = yaml.safe_load_all(example.read_text())
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def test_example_of_kubernetes_is_taken_and_waits_for_no_steps(tmp_path: Path) -> None:
    [text] = [one["data"]["picker.yaml"] for one in kubernetes_objects("ConfigMap").values()]
    (tmp_path / "picker.yaml").write_text(text)
    values = COMMAND.read({"config": tmp_path / "picker.yaml"})
    settings = picker_settings(values)
    assert settings.tokens is TokenSource.CHUNKS
    assert policy_of(values, settings.tokens) == ("fit", {"lockstep": False})


def test_example_of_kubernetes_starts_the_policy_server_that_its_pickers_name(
    equipoise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[PolicyServerSettings, Any]] = []

    def serve(settings: PolicyServerSettings, factory: PolicyFactory, _: object) -> int:
        made.append((settings, factory([1], [None])))
        return 0

    monkeypatch.setattr(policy_process, "serve_policy", serve)
    deployment = kubernetes_objects("Deployment")["equipoise-policy"]["spec"]
    assert deployment["replicas"] == 1
    pod = deployment["template"]
    [container] = pod["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "equipoise"
    assert equipoise(*arguments).code == 0
    [(settings, policy)] = made
    assert settings == PolicyServerSettings(host="0.0.0.0")
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == settings.metrics_port

    [config] = kubernetes_objects("ConfigMap").values()
    (tmp_path / "picker.yaml").write_text(config["data"]["picker.yaml"])
    values = COMMAND.read({"config": tmp_path / "picker.yaml"})
    pickers = picker_settings(values)
    service = kubernetes_objects("Service")["equipoise-policy"]
    assert str(pickers.policy_server) == f"{service['metadata']['name']}:{settings.port}"
    assert service["spec"]["ports"][0]["port"] == settings.port
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    own = routing_policy_factory(*policy_of(values, pickers.tokens))([1], [None])
    assert policy.settings == own.settings  # type: ignore[attr-defined]  # a native one

    [network] = kubernetes_objects("NetworkPolicy").values()
    assert network["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    [front_ends] = [
        rule["from"]
        for rule in network["spec"]["ingress"]
        if {"port": settings.port} in rule["ports"]
    ]
    labels = kubernetes_objects("Deployment")["equipoise-picker"]["spec"]["template"]["metadata"]
    assert front_ends == [{"podSelector": {"matchLabels": labels["labels"]}}]


def test_example_configuration_is_taken() -> None:
    root = Path(__file__).parents[3]
    values = COMMAND.read({"config": root / "examples" / "picker" / "picker.yaml"})
    assert picker_settings(values).tokens is TokenSource.METRICS


def test_example_of_image_runs_a_command_that_is_taken_as_no_superuser() -> None:
    text = (Path(__file__).parents[3] / "examples" / "picker" / "Dockerfile").read_text()
    lines = dict(line.split(" ", 1) for line in text.splitlines() if line[:1].isupper())
    entry, arguments = json.loads(lines["ENTRYPOINT"]), json.loads(lines["CMD"])
    assert (entry, refusal(arguments)) == (["equipoise"], None)
    config = Path(arguments[arguments.index("--config") + 1])
    assert f":{config.parent}:ro" in text, "where the example mounts it"
    assert int(lines["USER"].partition(":")[0]) > 0
    ports = PickerPorts()
    assert lines["EXPOSE"] == f"{ports.grpc} {ports.health} {ports.http}"
