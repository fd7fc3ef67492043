"""What users write into the engine's configuration, or the environment."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.hal.errors import ConfigError
from equipoise.integrations.vllm.settings import (
    SETTINGS_KEY,
    SETTINGS_VARIABLE,
    EplbSettings,
    parse_settings,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
PARTS = st.sampled_from(["policy", "engine", "handover", "routing", "other"])
OPTIONS = st.sampled_from(["deadline", "target", "shares", "sub_window", "policy", "options", "x"])
GIVEN = st.dictionaries(PARTS, JSON | st.dictionaries(OPTIONS, JSON, max_size=2), max_size=3)


def said_of(value: Any) -> str | None:
    """Of settings that are refused, why; None of those that are understood."""
    try:
        found = parse_settings({SETTINGS_KEY: value}, {})
    except ConfigError as error:
        return str(error)
    assert found is None or found.enabled_features
    return None


@given(GIVEN | JSON)
def test_settings_are_parsed_or_refused_by_name(given_: Any) -> None:
    found = said_of(given_)
    assert found is None or SETTINGS_KEY in found or "engine plans by itself" in found


@pytest.mark.parametrize(
    "additional",
    [None, {}, {"other": 1}, {SETTINGS_KEY: None}, {SETTINGS_KEY: False}, {SETTINGS_KEY: {}}, 7],
)
def test_settings_are_none_when_nothing_is_configured(additional: Any) -> None:
    assert parse_settings(additional, {}) is None


def test_settings_part_takes_true_or_options() -> None:
    found = parse_settings(
        {SETTINGS_KEY: {"engine": {"shares": "exact"}, "handover": True, "policy": False}}, {}
    )
    assert found is not None
    assert found.enabled_features == ("engine", "handover")
    assert found.engine == EplbSettings(shares="exact")


def test_settings_routing_takes_a_policy_name() -> None:
    found = parse_settings({SETTINGS_KEY: {"routing": "br0"}}, {})
    assert found is not None
    assert found.routing is not None
    assert found.routing.policy == "br0"


def test_settings_environment_applies_only_without_config() -> None:
    environment = {SETTINGS_VARIABLE: json.dumps({"policy": True})}
    by_environment = parse_settings({}, environment)
    assert by_environment is not None
    assert by_environment.enabled_features == ("policy",)
    assert parse_settings({SETTINGS_KEY: {"handover": True}}, environment) == parse_settings(
        {SETTINGS_KEY: {"handover": True}}, {}
    )
    assert parse_settings({SETTINGS_KEY: False}, environment) is None
    assert parse_settings({}, {SETTINGS_VARIABLE: " "}) is None


def test_settings_refuse_invalid_json_in_environment() -> None:
    with pytest.raises(ConfigError, match="EQUIPOISE_VLLM is no JSON"):
        parse_settings({}, {SETTINGS_VARIABLE: "engine"})


@pytest.mark.parametrize(
    ("part", "options", "said"),
    [
        ("engine", {"sharez": 1}, "unknown sharez; options are"),
        ("engine", {"shares": "some"}, "shares must be static, lagged or exact"),
        ("engine", {"communicator": "mpi"}, "communicator must be one of gloo, hccl, nccl, got"),
        ("engine", {"communicator": []}, "communicator must be one of gloo, hccl, nccl, got"),
        ("engine", {"sub_window": 0}, "sub_window must be a whole number"),
        ("engine", {"metrics_port": 70000}, "metrics_port must be 1 to 65535"),
        ("policy", {"target": -1}, "target must be a number from 0"),
        ("policy", {"gain": True}, "gain must be a number from 0"),
        ("handover", {"deadline": float("inf")}, "deadline must be 0.1 to 86400 seconds"),
        ("engine", {"deadline": 0}, "deadline must be 0.1 to 86400 seconds"),
        ("engine", {"staging_mb": 1e308}, "staging_mb must be a number from 0 to"),
        ("engine", {"gain": 1e6}, "gain must be a number from 0 to 1000"),
        ("handover", 3, "must be true, false or an object"),
        ("routing", {"policy": 3}, "policy is a name"),
    ],
)
def test_settings_refuse_wrong_option_and_name_its_part(part: str, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{SETTINGS_KEY}.{part}.*{said}"):
        parse_settings({SETTINGS_KEY: {part: options}}, {})


def test_settings_refuse_policy_together_with_engine() -> None:
    with pytest.raises(ConfigError, match="switch on `policy` or `engine`"):
        parse_settings({SETTINGS_KEY: {"policy": True, "engine": True}}, {})
