"""What the SGLang plugin does without SGLang: nothing where it is off, one line where it cannot."""

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.hal.errors import ConfigError, IntegrationError
from equipoise.integrations.sglang import doctor, entry, eplb_policy
from equipoise.integrations.sglang.settings import (
    Dispatch,
    SglangPolicySettings,
    policy_settings,
)

OFF = """
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from equipoise.integrations.sglang import entry
entry.register()
print(sorted(name for name in sys.modules if name.startswith("equipoise.")), "torch" in sys.modules)
"""


@pytest.mark.parametrize("value", [None, "", " "])
def test_sglang_entry_without_settings_imports_nothing(value: str | None) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(entry.SETTINGS_VARIABLE, None)
    if value is not None:
        environment[entry.SETTINGS_VARIABLE] = value
    done = subprocess.run(
        [sys.executable, "-c", OFF],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    package = "equipoise.integrations"
    assert done.stdout == f"{[package, f'{package}.sglang', f'{package}.sglang.entry']} False\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eplb_policy": true}', "SGLang is not installed: install sglang"),
        ("{", "EQUIPOISE_SGLANG is no JSON"),
        ('{"eplbb": true}', "EQUIPOISE_SGLANG: unknown eplbb; the only feature is eplb_policy$"),
        ('{"eplb": true}', "EQUIPOISE_SGLANG: eplb is not for SGLang, only eplb_policy is"),
        ("[]", "EQUIPOISE_SGLANG: the settings must be an object of features, got \\[\\]"),
        (
            '{"eplb_policy": {"dispatch": "exact"}}',
            "eplb_policy: dispatch must be tables or local, got 'exact'$",
        ),
    ],
)
def test_sglang_entry_ends_process_where_feature_cannot_be_had(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang logs an exception of a plugin, and starts without it."""
    monkeypatch.setenv(entry.SETTINGS_VARIABLE, text)
    with pytest.raises(SystemExit, match=message):
        entry.register()


@pytest.mark.parametrize("value", [{}, {"eplb_policy": False}, {"eplb_policy": None}, False])
def test_sglang_policy_is_off_where_settings_say_so(value: object) -> None:
    assert policy_settings(json.dumps(value)) is None


def test_sglang_policy_takes_words_of_vllm_integration_and_a_dispatch() -> None:
    text = '{"eplb_policy": {"min_gain": 0.05, "max_move_fraction": 0.1, "dispatch": "local"}}'
    assert policy_settings(text) == SglangPolicySettings(
        target=0.005, min_gain=0.05, max_move_fraction=0.1, dispatch=Dispatch.LOCAL
    )
    assert policy_settings('{"eplb_policy": {"target": 0.1}}') == SglangPolicySettings(target=0.1)
    assert policy_settings('{"eplb_policy": true}') == SglangPolicySettings(
        target=0.005, dispatch=Dispatch.TABLES
    )
    with pytest.raises(ConfigError, match="unknown gain"):
        policy_settings('{"eplb_policy": {"gain": 0.05}}')


def test_sglang_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor.examine()) == [
        ("SGLang", False, "SGLang is not installed: install sglang (tested: 0.5.23)")
    ]
    monkeypatch.setenv(doctor.PLUGINS_VARIABLE, "another, third")
    monkeypatch.setattr(doctor, "entry_points", lambda **_: ["ours"])
    assert doctor.plugin_finding() == (
        "plugin",
        False,
        "SGLANG_PLUGINS=another, third leaves it out",
    )
    monkeypatch.setenv(doctor.PLUGINS_VARIABLE, "another, equipoise")
    assert doctor.plugin_finding() == ("plugin", True, "found by SGLang")
    monkeypatch.setattr(doctor, "entry_points", lambda **_: [])
    assert doctor.plugin_finding()[1] is False


@pytest.fixture
def resolving(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's view of arguments that are being read: the arguments."""

    def declare(arguments: object, source: str, **fields: object) -> None:
        assert source == "equipoise"
        vars(arguments).update(fields)

    overrides: Any = ModuleType("sglang.srt.arg_groups.overrides")
    overrides.resolving_view = lambda arguments: arguments
    overrides.declare_resolution = declare
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, overrides.__name__, overrides)


def read_by_sglang(arguments: Any) -> None:
    """SGLang's own default with an all-to-all backend."""
    arguments.ep_dispatch_algorithm = arguments.ep_dispatch_algorithm or "static"


@pytest.mark.usefixtures("resolving")
@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_sglang_policy_without_eplb_ends_the_start(dispatch: Dispatch) -> None:
    arguments = SimpleNamespace(enable_eplb=False, ep_dispatch_algorithm=None)
    with pytest.raises(IntegrationError, match="needs --enable-eplb"):
        eplb_policy.resolve_arguments(
            SglangPolicySettings(dispatch=dispatch), read_by_sglang, arguments
        )


@pytest.mark.usefixtures("resolving")
@pytest.mark.parametrize(
    ("dispatch", "algorithm", "message"),
    [
        (Dispatch.TABLES, "static", "equipoise: eplb_policy switched on"),
        (Dispatch.LOCAL, "dynamic", "equipoise: eplb_policy switched on, with dispatch local"),
    ],
)
def test_sglang_policy_says_at_the_start_that_it_is_on(
    dispatch: Dispatch, algorithm: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = SimpleNamespace(
        enable_eplb=True, ep_dispatch_algorithm=None, elastic_ep_backend=None
    )
    with caplog.at_level("INFO"):
        eplb_policy.resolve_arguments(
            SglangPolicySettings(dispatch=dispatch), read_by_sglang, arguments
        )
    assert (arguments.ep_dispatch_algorithm, caplog.messages) == (algorithm, [message])


@pytest.mark.usefixtures("resolving")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ep_dispatch_algorithm": "lp"}, "takes the place of .* dynamic, not of lp$"),
        ({"elastic_ep_backend": "nixl"}, "is not for --elastic-ep-backend"),
    ],
)
def test_sglang_start_refuses_arguments_that_local_dispatch_cannot_serve(
    changed: dict[str, str], message: str
) -> None:
    arguments = SimpleNamespace(
        enable_eplb=True, ep_dispatch_algorithm=None, elastic_ep_backend=None
    )
    vars(arguments).update(changed)
    with pytest.raises(IntegrationError, match=message):
        eplb_policy.resolve_arguments(
            SglangPolicySettings(dispatch=Dispatch.LOCAL), read_by_sglang, arguments
        )


@pytest.mark.parametrize(
    ("grown", "elastic", "installed"),
    [(True, None, object()), (False, object(), object()), (False, None, None)],
)
def test_sglang_plans_itself_where_ranks_have_changed_or_nothing_is_installed(
    grown: bool, elastic: object, installed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    location: Any = ModuleType("sglang.srt.eplb.expert_location")
    location.ExpertLocationMetadata = None
    location.get_global_expert_location_metadata = lambda: installed
    ranks: Any = ModuleType("sglang.srt.elastic_ep.elastic_ep")
    ranks.ElasticEPStateManager = SimpleNamespace(instance=lambda: elastic)
    for name in ("sglang", "sglang.srt", "sglang.srt.eplb", "sglang.srt.elastic_ep"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (location, ranks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    manager, counts = SimpleNamespace(equipoise_changed_layers={1}), torch.ones(1, 2, 4)

    def stock(*arguments: object, broadcast_over_world: bool) -> object:
        return *arguments, broadcast_over_world

    answer = eplb_policy.plan_from_installed(
        SglangPolicySettings(), stock, manager, counts, broadcast_over_world=grown
    )
    assert answer == (manager, counts, grown)
    assert eplb_policy.only_changed_layers(lambda _: [[0], [1]], manager) == [[0], [1]]
