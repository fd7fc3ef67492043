"""How a picker ends: by a signal, and where a part of it fails."""

import os
import signal
from threading import Timer
from typing import Any

import pytest
from helpers.harnesses.picker_setup import ANY_PORT

from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.hal.errors import EquipoiseError
from equipoise.serve.health import HealthMonitor
from equipoise.serve.picker.server import serve_picker
from equipoise.serve.picker.settings import PickerSettings, StaticEndpoints
from equipoise.serve.settings import WorkerSettings

SETTINGS = PickerSettings(
    endpoints=StaticEndpoints(workers=(WorkerSettings(url="http://127.0.0.1:9", name="w0"),)),
    ports=ANY_PORT,
)


def serve(lines: list[str]) -> int:
    return serve_picker(SETTINGS, routing_policy_factory("fit", {}), lines.append)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_picker_ends_by_a_signal(number: signal.Signals) -> None:
    lines: list[str] = []
    timer = Timer(0.5, os.kill, (os.getpid(), number))
    timer.start()
    assert serve(lines) == 0
    timer.join()
    assert lines[0].startswith("picking on port")
    assert lines[1] == "ending: waiting for the requests under way"


def test_picker_ends_where_a_part_of_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_self: Any) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(HealthMonitor, "run", fail)
    with pytest.raises(EquipoiseError, match="a part of the picker failed: a mistake of ours"):
        serve([])
