"""The entry point: fails if a feature is requested, and does not disturb other users."""

import logging
import sys
from types import SimpleNamespace

import pytest

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm import entry
from equipoise.integrations.vllm.settings import SETTINGS_VARIABLE


@pytest.fixture(autouse=True)
def _nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["serve", "model"])


def test_entry_uses_variable_name_of_settings() -> None:
    assert entry.SETTINGS_VARIABLE == SETTINGS_VARIABLE


@pytest.mark.parametrize("how", ["variable", "argument"])
def test_entry_raises_import_error_when_a_part_is_configured(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "PLUGIN", "no_such_module")
    if how == "variable":
        monkeypatch.setenv(SETTINGS_VARIABLE, "{}")
    else:
        monkeypatch.setattr(sys, "argv", ["serve", "--additional-config", '{"equipoise": {}}'])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        entry.register()


def test_entry_only_warns_of_import_error_when_unconfigured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(entry, "PLUGIN", "no_such_module")
    with caplog.at_level(logging.WARNING):
        entry.register()
    assert "cannot be imported, and stays switched off" in caplog.text


def test_entry_passes_on_error_of_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise EngineUnsupported("not this one")

    monkeypatch.setitem(sys.modules, "a_plugin", SimpleNamespace(register=refuse))
    monkeypatch.setattr(entry, "PLUGIN", "a_plugin")
    with pytest.raises(EngineUnsupported, match="not this one"):
        entry.register()
