"""What vLLM loads: loud for who asks for a part, and in nobody else's way."""

import logging
import sys
from types import SimpleNamespace

import pytest

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm import entry
from equipoise.integrations.vllm.settings import VARIABLE


@pytest.fixture(autouse=True)
def _nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["serve", "model"])


def test_the_names_are_those_of_the_settings() -> None:
    assert entry.VARIABLE == VARIABLE


@pytest.mark.parametrize("how", ["variable", "argument"])
def test_who_asks_for_a_part_learns_that_nothing_can_be_imported(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "PLUGIN", "no_such_module")
    if how == "variable":
        monkeypatch.setenv(VARIABLE, "{}")
    else:
        monkeypatch.setattr(sys, "argv", ["serve", "--additional-config", '{"equipoise": {}}'])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        entry.register()


def test_nobody_else_is_stopped_by_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(entry, "PLUGIN", "no_such_module")
    with caplog.at_level(logging.WARNING):
        entry.register()
    assert "cannot be imported, and stays switched off" in caplog.text


def test_what_the_plugin_refuses_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise EngineUnsupported("not this one")

    monkeypatch.setitem(sys.modules, "a_plugin", SimpleNamespace(register=refuse))
    monkeypatch.setattr(entry, "PLUGIN", "a_plugin")
    with pytest.raises(EngineUnsupported, match="not this one"):
        entry.register()
