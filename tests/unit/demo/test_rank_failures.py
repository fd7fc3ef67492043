"""What a rank says when a wait passed its deadline."""

from typing import Any, cast

import pytest

from equipoise.demo.rank import _explain_failures
from equipoise.demo.settings import RunSettings
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import EquipoiseError, OperationTimeout, StreamTimeout, UsageError


class HealthyControlPlane:
    """A control plane that has lost nobody."""

    def lost_rank(self, timeout: float) -> Any:
        return None

    def announce_exit(self, reason: str) -> None:
        pass


@pytest.mark.parametrize("kind", [OperationTimeout, StreamTimeout])
def test_rank_timeout_names_deadline_option_and_its_value(kind: type[EquipoiseError]) -> None:
    control = cast(ControlPlane, HealthyControlPlane())
    remedy = r"^late; on a busy machine raise --deadline \(now 5 s, .* 60%"
    with pytest.raises(kind, match=remedy), _explain_failures(control, RunSettings(deadline=5.0)):
        raise kind("late")


def test_rank_other_error_does_not_name_deadline_option() -> None:
    control = cast(ControlPlane, HealthyControlPlane())
    with pytest.raises(UsageError, match=r"^wrong$"), _explain_failures(control, RunSettings()):
        raise UsageError("wrong")
