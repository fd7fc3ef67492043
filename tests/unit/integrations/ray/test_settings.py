"""Settings of the router, read where a deployment is written."""

import re
from typing import Any

import pytest
from helpers.fakes.fake_ray_serve import fake_ray

from equipoise.hal.errors import UsageError
from equipoise.integrations.ray.request_sizes import prompt_tokens
from equipoise.integrations.ray.settings import (
    ROUTER_CLASS,
    request_router_config,
    router_settings,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": None}, "policy has to be a name or PACKAGE:OBJECT, got None"),
        ({"policy_options": "lockstep=false"}, "policy_options has to be a mapping"),
        ({"policy_options": [1]}, "policy_options has to be a mapping"),
        ({"request_size": 5}, "request_size has to be PACKAGE:OBJECT, got 5"),
        ({"policy": "json:dumps"}, "^policy: 'json:dumps' makes no policy"),
        ({"policy": "best"}, "^policy: unknown name 'best'"),
        ({"policy_options": {"windows": 1}}, "^policy_options: unknown option 'windows'"),
        ({"policy_options": {"window": -1}}, "^policy fit: "),
    ],
)
def test_config_refuses_settings_that_make_no_router(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        request_router_config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"request_routing_stats_period": 1},
            "unknown setting 'request_routing_stats_period'; "
            "did you mean request_routing_stats_period_s?",
        ),
        ({"polcy": "fit"}, "unknown setting 'polcy'; did you mean policy?"),
        ({"zzz": 1}, "unknown setting 'zzz'; known: policy, policy_options, request_size, req"),
        ({"request_router_class": "a:b"}, "request_router_class is set here"),
        ({"request_router_kwargs": {}}, "request_router_kwargs is set here"),
    ],
)
def test_config_refuses_settings_that_ray_would_ignore(
    settings: dict[str, Any], message: str
) -> None:
    with fake_ray(), pytest.raises(UsageError, match=re.escape(message)):
        request_router_config(**settings)


def test_config_has_settings_of_the_router_and_of_ray() -> None:
    with fake_ray():
        config = request_router_config("fit", {"window": 8}, request_routing_stats_period_s=1.0)
    assert config.request_routing_stats_period_s == 1.0
    assert config.request_router_class == ROUTER_CLASS
    assert router_settings(**config.request_router_kwargs).request_size is prompt_tokens
