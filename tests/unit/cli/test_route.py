"""`equipoise route`: what it is told, and what it refuses before anything listens."""

import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT

from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.cli.parser import read_request
from equipoise.cli.route import COMMAND, RouteRequest, route_settings
from equipoise.hal.errors import UsageError
from equipoise.serve import dependencies, server
from equipoise.serve.settings import ClientRank, RouteSettings

ONE = "workers: [http://a:1]\n"
BAD = {
    "port: 1\n": "--workers is needed: --workers URL ..., or `workers:` in --config",
    "workers: []": "key 'workers': expected a list of URLs or of mappings",
    "workers: http://a:1": "key 'workers': expected a list",
    "workers: ['http://a:1']\nmax_body: 2MiB\nmax_buffered: 1MiB": (
        "--max-buffered must be at least --max-body (2097152), got 1048576"
    ),
    "workers: [7]": "workers: entry 1: expected a URL or a mapping, got 7",
    "workers: [a:1]": "workers: entry 1: url has to be http://HOST:PORT",
    "workers: ['http://a:99999']": "workers: entry 1: url 'http://a:99999'",
    "workers: ['http://u:p@a:1']": "must not have a query, a fragment or a user",
    "workers: ['http://a:1?x=1']": "must not have a query",
    "workers: ['http://a:1', 'http://a:1']": "two are called a:1: give them names",
    "workers: [{url: 'http://a:1', slot: 3}]": "entry 1: unknown key 'slot'; did you mean slots?",
    "workers: [{url: 'http://a:1', slots: 4, slots: 99}]": "key 'slots' is given twice from line 1",
    "workers: [{slots: 3}]": "entry 1: url has to be a text, got None",
    "workers: [{url: 'http://a:1', slots: 0}]": "entry 1: slots has to be a whole number",
    "workers: [{url: 'http://a:1', slots: true}]": "entry 1: slots has to be a whole number",
    "workers: [{url: 'http://a:1', headers: {X-A: 3}}]": "header X-A has to be a text in quotes",
    "workers: [{url: 'http://a:1', headers: {Host: a}}]": "'Host' cannot be a header here",
    'workers: [{url: "http://a:1", headers: {X: "a\\r\\nb"}}]': "header X has to be a text",
    "workers: [{url: 'http://a:1', headers: [X]}]": "headers have to be a mapping",
    ONE + "port: 70000": "--port must be 0 to 65535, got 70000",
    ONE + "tls_key: k.pem": "--tls-key needs --tls-cert",
    ONE + "queue_timeout: 0": "--queue-timeout must be above 0",
    ONE + "total_timeout: 1e9": "--total-timeout must be above 0, up to 604800 seconds",
    ONE + "attempts: 0": "--attempts must be 1 to 2147483648, got 0",
    ONE + "max_header: 10": "--max-header must be at least 1KiB, got 10",
    ONE + "health_interval: 0": "--health-interval must be above 0",
    ONE + "client_rank: maybe": "key 'client_rank': expected honour or forbid, got 'maybe'",
    ONE + "api_key_file: none.txt": "--api-key-file: none.txt cannot be read",
    ONE + "api_key_file: empty.txt": "--api-key-file: empty.txt has no key in it",
    ONE + "worker_key_file: two.txt": "--worker-key-file: two.txt has more than one key",
    ONE + "api_key_file: bad.txt": "bad.txt has a key that no header can carry",
    ONE + "policy: fitt": "--policy: unknown name 'fitt'; known: random",
    ONE + "policy: nowhere:at_all": "--policy: 'nowhere:at_all' does not import",
    ONE + "policy: os:sep": "--policy: 'os:sep' cannot be called",
    ONE + "policy: os:getcwd": "--policy: 'os:getcwd' makes no policy: TypeError",
    ONE + "policy: builtins:zip": "what 'builtins:zip' makes is no policy: it has no on_arrival",
    ONE + "policy: vllm": "--policy vllm decides by reports of workers: --metrics is needed",
    ONE + "policy: sglang_tokens": "--metrics is needed",
    ONE
    + "policy_options: {windw: 3}": "--policy-options: unknown option 'windw'; known: when_full",
    ONE + "policy_options: {window: 1.5}": "window has to be int, got 1.5",
    ONE + "policy_options: {window: -1}": "--policy fit: window: expected at least 1",
    ONE + "policy_options: {when_full: x}": "when_full has to be queue or hold, got 'x'",
    ONE + "policy: br0\npolicy_options: {window: 3}": "window has no effect on br0: it is for fit",
    ONE + "policy_options: {when_full: hold}": "when_full has no effect on fit: it is for random",
    ONE + "policy_options: {prefill_wait: 2, prompt_weight: 0}": "no effect with prompt_weight 0",
    ONE + "policy_options: {prefill_wait: 2, lockstep: false}": "no effect with lockstep false",
    ONE + "policy_options: [window]": "key 'policy_options': expected NAME=VALUE, or a mapping",
    ONE + "metrics: {waiting: w}": "--metrics: running is needed",
    ONE + "metrics: {wating: w}": "--metrics: unknown key 'wating'; known: waiting, running",
    ONE + "metrics: {waiting: w, running: 'r{'}": "running has to be a name, got 'r{'",
    ONE + "metrics: {waiting: w, running: r}": "--metrics: tokens are needed",
    ONE + "metrics: {waiting: w, running: r, kv_usage: k}": "kv_usage and kv_tokens of worker a:1",
    ONE + "metrics: {waiting: w, running: r, tokens: t, path: x}": "path has to be a path",
    ONE + "metrics: {waiting: w, running: r, tokens: t, generated: g}": "generated is for",
    ONE + "metrics: {waiting: w, running: r, interval: 0}": "interval must be 0.01 to 3600 seconds",
    ONE + "metrics: {waiting: w, running: r, timeout: .nan}": "timeout must be 0.01 to 3600",
    "workers: [{url: 'http://a:1', name: x}, {url: 'http://a:1', name: y}]\n"
    "metrics: {waiting: w, running: r, tokens: t}": "several workers are http://a:1: rank_label",
    ONE + "allowed_origins: [https://a.example/path]": "expected *, none, or origins",
    ONE + "allowed_origins: chat.example": "expected *, none, or origins",
    ONE + "log: .": "--log: . cannot be written: Is a directory",
    ONE + "tls_cert: none.pem": "--tls-cert none.pem: ",
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[RouteSettings]:
    """Settings that would be served."""
    settings_seen: list[RouteSettings] = []

    def serve(settings: RouteSettings, *_: object) -> int:
        settings_seen.append(settings)
        return 0

    monkeypatch.setattr(server, "serve", serve)
    return settings_seen


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=map(repr, BAD))
def test_route_rejects_bad_config_with_one_line(
    equipoise: Callable[..., Any], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "route.yaml").write_text(text)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "two.txt").write_text("a\nb\n")
    (tmp_path / "bad.txt").write_text("clé\n")
    answer = equipoise("route", "--config", "route.yaml")
    assert answer.code == 2, answer.err
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line


def test_route_finds_policy_in_working_directory(
    equipoise: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: list[RouteSettings],
) -> None:
    """A script, which is what runs the command, does not look there by itself."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copy(ROOT / "examples" / "routing_policy.py", tmp_path / "policy_of_this_folder.py")
    policy = ("--policy", "policy_of_this_folder:FewestRequests")
    answer = equipoise("route", "--workers", "http://a:1", *policy)
    assert answer.code == 0, answer.err
    assert len(served) == 1


def test_route_command_line_overrides_config_file(
    equipoise: Callable[..., Any], tmp_path: Path, served: list[RouteSettings]
) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    (tmp_path / "route.yaml").write_text(
        "workers:\n"
        "  - http://a:1/\n"
        "  - {url: 'https://b:2/base', name: b3, slots: 8, kv_tokens: 99,"
        " headers: {X-data-parallel-rank: '3'}}\n"
        "slots: 16\nport: 7\nmax_queued: 0\ntoken_timeout: 5\nlost_after: 7\nmax_body: 2MiB\n"
        "api_key_file: keys\nclient_rank: forbid\nheartbeat_interval: 0\n"
        "allowed_origins: [https://a.example, https://b.example:8]\n"
    )
    line = ("--config", "route.yaml", "--port", "8", "--health-timeout", "0.5")
    assert equipoise("route", *line).code == 0
    [settings] = served
    first, second = settings.workers
    assert (first.url, first.name, first.slots, first.kv_tokens) == ("http://a:1", "a:1", 16, None)
    assert (second.url, second.name, second.slots) == ("https://b:2/base", "b3", 8)
    assert (second.kv_tokens, second.rank) == (99, 3)
    assert (settings.access.port, settings.access.keys) == (8, ("one", "two"))
    assert (settings.limits.queued, settings.limits.body) == (0, 2 << 20)
    assert (settings.timeouts.token, settings.timeouts.queue) == (5.0, 60.0)
    assert (settings.health.lost_after, settings.health.timeout) == (7, 0.5)
    assert settings.client_rank is ClientRank.FORBID
    assert settings.timeouts.heartbeat == 0.0
    assert settings.access.allowed_origins == ("https://a.example", "https://b.example:8")


def test_route_allows_no_origin_by_none() -> None:
    line = ["route", "--workers", "http://a:1", "--allowed-origins", "none"]
    assert route_settings(read_request(line)[1]).access.allowed_origins == ()


def test_route_help_defaults_match_settings() -> None:
    settings = route_settings(RouteRequest(workers=("http://a:1",)))
    shown_defaults = {option.key: option.shown_default for option in COMMAND.options.values()}
    assert shown_defaults["queue_timeout"] == f"{settings.timeouts.queue:g}"
    assert shown_defaults["max_body"] == f"{settings.limits.body >> 20}MiB"
    assert shown_defaults["max_header"] == f"{settings.limits.header >> 10}KiB"
    assert shown_defaults["lost_after"] == str(settings.health.lost_after)
    assert shown_defaults["port"] == str(settings.access.port)
    assert shown_defaults["slots"] == str(settings.workers[0].slots)


def test_route_accepts_workers_on_command_line() -> None:
    line = ["route", "--workers", "http://a:1", "http://b:2", "--workers", "http://c:3"]
    _, request = read_request([*line, "--policy-options", "window=32", "slack=.5"])
    assert [one.name for one in route_settings(request).workers] == ["a:1", "b:2", "c:3"]
    assert dict(request.policy_options) == {"window": 32, "slack": 0.5}
    assert callable(routing_policy_factory("fit", dict(request.policy_options)))


@pytest.mark.parametrize("option", ["--policy-options", "--metrics"])
def test_route_refuses_a_setting_that_is_there_twice(option: str) -> None:
    line = ["route", "--workers", "http://a:1", option, "path=3", "path=4"]
    with pytest.raises(UsageError, match=f"{option}: path is there twice"):
        route_settings(read_request(line)[1])


def test_route_custom_policy_rejects_options() -> None:
    with pytest.raises(UsageError, match="are for policies by name"):
        routing_policy_factory("helpers.fakes.late_binding_policy:LateBinding", {"window": 3})


def test_route_missing_aiohttp_names_install_command(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        dependencies, "find_spec", lambda name: None if name == "aiohttp" else find_spec
    )
    answer = equipoise("route", "--workers", "http://a:1")
    assert answer.code == 2
    assert answer.err == (
        "equipoise: error: aiohttp is missing: pip install '.[serve]' in a clone of equipoise\n"
    )


def test_route_example_config_is_accepted(
    equipoise: Callable[..., Any], tmp_path: Path, served: list[RouteSettings]
) -> None:
    example = ROOT / "examples" / "configs" / "route.yaml"
    assert list(tmp_path.iterdir()) == []  # it starts as it is shipped
    assert equipoise("route", "--config", str(example)).code == 0
    [settings] = served
    assert len(settings.workers) >= 3
    assert {one.rank for one in settings.workers} >= {0, 1}


def test_route_docs_example_config_is_accepted(
    equipoise: Callable[..., Any], tmp_path: Path, served: list[RouteSettings]
) -> None:
    page = (ROOT / "docs" / "route.md").read_text(encoding="utf-8")
    (tmp_path / "keys.txt").write_text("secret\n")
    (tmp_path / "route.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    assert equipoise("route", "--config", "route.yaml").code == 0
    assert served


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_route_report_example_configs_are_accepted(name: str) -> None:
    path = ROOT / "examples" / "configs" / f"route-reports-{name}.yaml"
    settings = route_settings(COMMAND.read({"config": path}))
    assert settings.reports is not None
    assert settings.reports.interval == 0.1
    assert set(settings.reports.names) >= {settings.reports.waiting, settings.reports.running}
