"""`equipoise policy-server`: its options; and the option by which front ends name it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.policy_server import COMMAND
from equipoise.serve import policy_process, server
from equipoise.serve.picker import server as picker_server
from equipoise.serve.policy_process import PolicyServerSettings
from equipoise.serve.settings import PolicyServerAddress

ENDPOINT = "http://10.0.0.1:8000"
BAD = {
    "prot: 1": "unknown key 'prot'; did you mean port?",
    "workers: ['http://10.0.0.1:8000']": "unknown key 'workers'",
    "port: 70000": "--port must be 0 to 65535, got 70000",
    "port: -1": "--port must be 0 to 65535, got -1",
    "metrics_port: 70000": "--metrics-port must be 0 to 65535, got 70000",
    "port: many": "key 'port': expected",
    "policy: nope": "--policy: unknown name 'nope'",
    "policy_options: {windw: 3}": "unknown option 'windw'",
    "policy_options: {front_ends: 2}": "--policy-options: front_ends has no effect here",
    "policy_options: {front_end: 1}": "--policy-options: front_end has no effect here",
    "policy: helpers.fakes.failing_policies:FixedWorkers": "--policy: it takes no new worker",
    "policy: 'helpers.fakes.late_binding_policy:LateBinding'\npolicy_options: {slack: 1}": (
        "--policy-options are for policies by name"
    ),
}
BAD_ADDRESSES = (
    "host", "host:", "host:0", "host:99999", "host:x", ":9004", "http://h:1", "h:1/", "user@h:1",
    "::1:9004", "[::1:9004", "a..b:1", f"{'a' * 64}:1",
)  # fmt: skip
GOOD_ADDRESSES = {
    "host:9004": PolicyServerAddress("host", 9004),
    "10.0.0.9:1": PolicyServerAddress("10.0.0.9", 1),
    "[::1]:9004": PolicyServerAddress("::1", 9004),
}
SERVE = {"route": (server, "serve"), "picker": (picker_server, "serve_picker")}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Settings that a command would serve with."""
    seen: list[Any] = []

    def serve(settings: object, *_: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(policy_process, "serve_policy", serve)
    for module, name in SERVE.values():
        monkeypatch.setattr(module, name, serve)
    return seen


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=map(repr, BAD))
def test_policy_server_rejects_bad_config_with_one_line(
    equipoise: Callable[..., Any], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    answer = equipoise("policy-server", "--config", "policy.yaml")
    assert answer.code == 2, answer.err
    line = answer.err.splitlines()[-1]
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert "Traceback" not in answer.err


def test_policy_server_command_line_overrides_config_file(
    equipoise: Callable[..., Any], tmp_path: Path, served: list[Any]
) -> None:
    (tmp_path / "policy.yaml").write_text(
        "policy: br0\npolicy_options: {lockstep: false}\nhost: 0.0.0.0\nport: 7\nmetrics_port: 0\n"
    )
    assert equipoise("policy-server", "--config", "policy.yaml", "--port", "8").code == 0
    assert served == [PolicyServerSettings(host="0.0.0.0", port=8, metrics_port=0)]


def test_policy_server_help_defaults_match_settings(
    equipoise: Callable[..., Any], served: list[Any]
) -> None:
    assert equipoise("policy-server").code == 0
    assert served == [PolicyServerSettings()]
    shown = {option.key: option.shown_default for option in COMMAND.options.values()}
    for key in ("host", "port", "metrics_port"):
        assert shown[key] == str(getattr(PolicyServerSettings(), key))


def test_policy_by_reports_warns_that_front_ends_need_metrics(
    equipoise: Callable[..., Any], served: list[Any]
) -> None:
    answer = equipoise("policy-server", "--policy", "vllm")
    assert answer.code == 0
    assert "--policy vllm decides by reports of workers: each front end needs" in answer.err
    assert len(served) == 1


@pytest.mark.parametrize("command", ["policy-server", *SERVE])
def test_command_refuses_a_setting_of_the_policy_that_is_there_twice(
    equipoise: Callable[..., Any], served: list[Any], command: str
) -> None:
    workers = () if command == "policy-server" else ("--workers", ENDPOINT)
    answer = equipoise(command, *workers, "--policy-options", "lockstep=false", "lockstep=true")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].endswith("--policy-options: lockstep is there twice")
    assert not served


@pytest.mark.parametrize("address", BAD_ADDRESSES)
@pytest.mark.parametrize("command", SERVE)
def test_front_end_refuses_bad_address_of_a_policy_server(
    equipoise: Callable[..., Any], served: list[Any], command: str, address: str
) -> None:
    answer = equipoise(command, "--workers", ENDPOINT, "--policy-server", address)
    assert answer.code == 2
    expected = f"equipoise: error: --policy-server: expected HOST:PORT, got {address!r}"
    assert answer.err.splitlines()[-1] == expected
    assert not served


@pytest.mark.parametrize("command", SERVE)
def test_front_end_refuses_empty_address_of_a_policy_server(
    equipoise: Callable[..., Any], served: list[Any], command: str
) -> None:
    answer = equipoise(command, "--workers", ENDPOINT, "--policy-server", "")
    assert answer.code == 2
    assert "--policy-server: expected a name, got ''" in answer.err.splitlines()[-1]
    assert not served


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
@pytest.mark.parametrize("command", SERVE)
def test_front_end_takes_address_of_a_policy_server(
    equipoise: Callable[..., Any], served: list[Any], command: str, address: str
) -> None:
    assert equipoise(command, "--workers", ENDPOINT, "--policy-server", address).code == 0
    [settings] = served
    assert settings.policy_server == GOOD_ADDRESSES[address]
    assert str(settings.policy_server) == address


@pytest.mark.parametrize("command", SERVE)
def test_front_end_has_no_policy_server_by_default(
    equipoise: Callable[..., Any], served: list[Any], command: str
) -> None:
    assert equipoise(command, "--workers", ENDPOINT).code == 0
    assert served[0].policy_server is None


def test_route_with_a_policy_server_refuses_workers_that_are_one(
    equipoise: Callable[..., Any], tmp_path: Path, served: list[Any]
) -> None:
    one, other = f"{{url: '{ENDPOINT}', name: a}}", f"{{url: '{ENDPOINT}', name: b}}"
    (tmp_path / "route.yaml").write_text(f"workers: [{one}, {other}]")
    assert equipoise("route", "--config", "route.yaml").code == 0
    answer = equipoise("route", "--config", "route.yaml", "--policy-server", "h:1")
    assert answer.code == 2
    assert f"workers: {ENDPOINT} is there twice: give them headers" in answer.err
    assert len(served) == 1


def test_picker_refuses_endpoints_whose_headers_differ_in_case_only(
    equipoise: Callable[..., Any], tmp_path: Path, served: list[Any]
) -> None:
    entries = ", ".join(
        f"{{url: '{ENDPOINT}', name: {name}, headers: {{{name}: '1'}}}}" for name in ("X-A", "x-a")
    )
    (tmp_path / "picker.yaml").write_text(f"workers: [{entries}]")
    answer = equipoise("picker", "--config", "picker.yaml")
    assert answer.code == 2
    assert f"workers: {ENDPOINT} is there twice" in answer.err
    assert not served
