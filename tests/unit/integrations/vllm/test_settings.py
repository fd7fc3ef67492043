"""What users write into the engine's configuration, or the environment."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import ConfigError
from equipoise.integrations.vllm.entry import SETTINGS_KEY, SETTINGS_VARIABLE
from equipoise.integrations.vllm.settings import EplbSettings, parse_settings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
PARTS = st.sampled_from(["eplb_policy", "eplb", "pp_transport", "dp_load_balancer", "other"])
OPTIONS = st.sampled_from(
    ["timeout", "target", "shares", "sub_window", "policy", "policy_options", "x"]
)
SETTINGS_VALUES = st.dictionaries(
    PARTS, JSON | st.dictionaries(OPTIONS, JSON, max_size=2), max_size=3
)


def said_of(value: Any) -> str | None:
    """The error of settings that are refused, else None."""
    try:
        plugin_settings = parse_settings({SETTINGS_KEY: value}, {})
    except ConfigError as error:
        return str(error)
    assert plugin_settings is None or plugin_settings.enabled_features
    return None


@given(SETTINGS_VALUES | JSON)
def test_settings_are_parsed_or_refused_by_name(value: Any) -> None:
    message = said_of(value)
    assert message is None or SETTINGS_KEY in message or "eplb plans by itself" in message


@pytest.mark.parametrize(
    "additional",
    [None, {}, {"other": 1}, {SETTINGS_KEY: None}, {SETTINGS_KEY: False}, {SETTINGS_KEY: {}}, 7],
)
def test_settings_are_none_when_nothing_is_configured(additional: Any) -> None:
    assert parse_settings(additional, {}) is None


def test_settings_part_takes_true_or_options() -> None:
    plugin_settings = parse_settings(
        {
            SETTINGS_KEY: {
                "eplb": {"shares": "exact"},
                "pp_transport": True,
                "eplb_policy": False,
            }
        },
        {},
    )
    assert plugin_settings is not None
    assert plugin_settings.enabled_features == ("eplb", "pp_transport")
    assert plugin_settings.eplb == EplbSettings(shares="exact")


def test_settings_routing_takes_a_policy_name() -> None:
    plugin_settings = parse_settings({SETTINGS_KEY: {"dp_load_balancer": "br0"}}, {})
    assert plugin_settings is not None
    assert plugin_settings.dp_load_balancer is not None
    assert plugin_settings.dp_load_balancer.policy == "br0"


def test_settings_environment_applies_only_without_config() -> None:
    environment = {SETTINGS_VARIABLE: json.dumps({"eplb_policy": True})}
    by_environment = parse_settings({}, environment)
    assert by_environment is not None
    assert by_environment.enabled_features == ("eplb_policy",)
    assert parse_settings({SETTINGS_KEY: {"pp_transport": True}}, environment) == parse_settings(
        {SETTINGS_KEY: {"pp_transport": True}}, {}
    )
    assert parse_settings({SETTINGS_KEY: False}, environment) is None
    assert parse_settings({}, {SETTINGS_VARIABLE: " "}) is None


def test_settings_refuse_invalid_json_in_environment() -> None:
    with pytest.raises(ConfigError, match="EQUIPOISE_VLLM is no JSON"):
        parse_settings({}, {SETTINGS_VARIABLE: "eplb"})


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        ("eplb", {"sharez": 1}, "unknown sharez; options are"),
        ("eplb", {"shares": "some"}, "shares must be one of static, lagged, local, node, exact"),
        ("eplb", {"communicator": "mpi"}, "communicator must be one of gloo, hccl, nccl, got"),
        ("eplb", {"communicator": []}, "communicator must be one of gloo, hccl, nccl, got"),
        ("eplb", {"sub_window": 0}, "sub_window must be a whole number"),
        ("eplb", {"metrics_port": 70000}, "metrics_port must be 1 to 65535"),
        ("eplb", {"metrics_port": 1, "metrics_address": 1}, "metrics_address must be an address"),
        ("eplb", {"metrics_address": "0.0.0.0"}, "metrics_address has no effect without"),
        ("eplb", {"max_stalled_steps": 0}, "max_stalled_steps must be a whole number from 1 to"),
        ("eplb_policy", {"target": -1}, "target must be a number from 0"),
        ("eplb_policy", {"max_move_fraction": 0}, "max_move_fraction 0 would move nothing"),
        ("eplb_policy", {"min_gain": True}, "min_gain must be a number from 0"),
        (
            "pp_transport",
            {"timeout": float("inf")},
            "timeout must be 0.1 to 86400 seconds",
        ),
        ("eplb", {"timeout": 0}, "timeout must be 0.1 to 86400 seconds"),
        ("eplb", {"staging_bytes": 1e308}, "staging_bytes must be whole bytes such as"),
        ("eplb", {"staging_bytes": 0}, "staging_bytes must be whole bytes such as"),
        ("eplb", {"staging_bytes": "64 mib"}, "staging_bytes must be whole bytes such as"),
        ("eplb", {"min_gain": 1e6}, "min_gain must be a number from 0 to 1000"),
        ("eplb", {"headroom": 1001}, "headroom must be a whole number from 0 to 1000"),
        ("eplb", {"headroom": -1}, "headroom must be a whole number from 0 to 1000"),
        ("eplb", {"headroom": 2.0}, "headroom must be a whole number from 0 to 1000"),
        ("eplb", {"sub_window": 10**30}, "sub_window must be a whole number from 1 to"),
        ("dp_load_balancer", "", "policy is a name"),
        ("eplb", {"commit": "locked"}, "commit must be staged or in_place"),
        ("eplb", {"layer_updates_per_iter": 2}, "layer_updates_per_iter is for commit in_place"),
        (
            "eplb",
            {"commit": "in_place", "layer_updates_per_iter": 0},
            "layer_updates_per_iter must be a whole number from 1",
        ),
        (
            "eplb",
            {"commit": "in_place", "staging_bytes": "1GiB"},
            "staging_bytes is for commit staged",
        ),
        ("pp_transport", 3, "must be true, false or an object"),
        ("dp_load_balancer", {"policy": 3}, "policy is a name"),
    ],
)
def test_settings_refuse_wrong_option_and_name_its_part(
    part: str, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{SETTINGS_KEY}.{part}.*{message}"):
        parse_settings({SETTINGS_KEY: {part: options}}, {})


def test_settings_refuse_policy_together_with_engine() -> None:
    with pytest.raises(ConfigError, match="switch on `eplb_policy` or `eplb`"):
        parse_settings({SETTINGS_KEY: {"eplb_policy": True, "eplb": True}}, {})
