"""Settings of the router, read where a deployment is written."""

from typing import Any

import pytest

from equipoise.hal.errors import UsageError
from equipoise.integrations.ray.settings import request_router_config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": None}, "policy has to be a name or PACKAGE:OBJECT, got None"),
        ({"policy_options": "lockstep=false"}, "policy_options has to be a mapping"),
        ({"policy_options": [1]}, "policy_options has to be a mapping"),
        ({"request_size": 5}, "request_size has to be PACKAGE:OBJECT, got 5"),
        ({"policy": "json:dumps"}, "'json:dumps' makes no policy"),
    ],
)
def test_config_refuses_settings_that_make_no_router(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        request_router_config(**settings)
