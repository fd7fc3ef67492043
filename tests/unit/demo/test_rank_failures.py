"""What is said of a rank whose wait passed its deadline, or that does not come up."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from equipoise.demo import launcher
from equipoise.demo.launcher import RankProcesses
from equipoise.demo.progress import NoProgress
from equipoise.demo.rank import _explain_failures
from equipoise.demo.settings import RunSettings
from equipoise.demo.worker import RankTask
from equipoise.hal.communicator import RendezvousHost
from equipoise.hal.control_plane import ControlPlane
from equipoise.hal.errors import (
    ControlError,
    EquipoiseError,
    OperationTimeout,
    StreamTimeout,
    UsageError,
)


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


class HostWithoutBeats:
    """A rendezvous at which no rank has arrived."""

    def beat(self, rank: int) -> tuple[int, str]:
        return 0, "start-up"


def test_rank_that_does_not_come_up_names_deadline_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "START", 0.0)
    task = RankTask(RunSettings(ranks=1, deadline=0.0), Path(os.devnull), os.getpid())
    ranks = RankProcesses(task, cast(RendezvousHost, HostWithoutBeats()), NoProgress())
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    remedy = r"rank 0 gave no sign of life .*: on a busy machine raise --deadline .*\(now 0 s\)$"
    with subprocess.Popen(sleeper) as process:
        try:
            ranks.processes = [cast(Any, process)]
            with pytest.raises(ControlError, match=remedy):
                ranks._check_beats()
        finally:
            process.kill()
