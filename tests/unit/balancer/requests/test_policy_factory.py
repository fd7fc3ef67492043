"""Options of policies: what a file and a command line may say."""

import pytest

from equipoise.balancer.requests.policy_factory import settings_of
from equipoise.hal.errors import UsageError


@pytest.mark.parametrize(
    ("value", "lockstep"), [(False, False), (True, True), ("false", False), ("True", True)]
)
def test_switch_option_is_read_from_yaml_and_text(value: object, lockstep: bool) -> None:
    assert settings_of("fit", {"lockstep": value}).lockstep is lockstep


@pytest.mark.parametrize("value", ["no", 0, None, 1.0])
def test_switch_option_refuses_other_values(value: object) -> None:
    with pytest.raises(UsageError, match="lockstep has to be true or false, got"):
        settings_of("fit", {"lockstep": value})
