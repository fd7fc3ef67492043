"""The entry point: one hook, which imports the rest when a configuration mentions equipoise."""

import logging
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.fakes.fake_vllm import CONFIGURATION, WORKERS, configuration, engine

from equipoise.integrations.vllm import entry
from equipoise.integrations.vllm.entry import ORIGINAL_ATTRIBUTE, SETTINGS_KEY, SETTINGS_VARIABLE

OFF = """
import sys
from helpers.fakes.fake_vllm import CONFIGURATION, WORKERS, configuration, engine
from equipoise.integrations.vllm import entry

with engine() as modules:
    before = {name: dict(vars(modules[name])) for name in modules}
    own = dict(vars(modules[CONFIGURATION].EngineArgs))
    del sys.modules[WORKERS]  # as in a front end
    entry.register()
    config = configuration({"other": 1})
    assert modules[CONFIGURATION].EngineArgs(config).create_engine_config() is config
    assert {name: dict(vars(modules[name])) for name in modules} == before
    changed = {name for name, value in vars(modules[CONFIGURATION].EngineArgs).items()
               if own.get(name) is not value}
    print(sorted(changed))
print(sorted(name for name in sys.modules if name.startswith("equipoise.")))
print("torch" in sys.modules)
"""


class Worker:
    """A worker without an extension."""

    devices = 0


class ExtendedWorker(Worker):
    """One that has it, as the engine puts it in."""

    inits = 0

    def init_worker_extension(self) -> None:
        self.inits += 1


@pytest.fixture(autouse=True)
def _nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["serve", "model"])


def plugin_double(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of the plugin: what was called in it."""
    calls: list[str] = []
    double: Any = ModuleType("a_plugin")
    double.switch_on = lambda config: calls.append("on")
    double.switch_off = lambda: calls.append("off")
    monkeypatch.setitem(sys.modules, "a_plugin", double)
    monkeypatch.setattr(entry, "PLUGIN", "a_plugin")
    return calls


def test_entry_without_settings_imports_nothing_and_replaces_one_function() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFF],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    changed, imported, has_torch = done.stdout.splitlines()
    assert changed == "['create_engine_config']"
    packages = "'equipoise.integrations', 'equipoise.integrations.vllm'"
    assert imported == f"[{packages}, 'equipoise.integrations.vllm.entry']"
    assert has_torch == "False"


@pytest.mark.parametrize("how", ["key", "variable"])
def test_entry_switches_on_what_is_configured(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plugin_double(monkeypatch)
    if how == "variable":
        monkeypatch.setenv(SETTINGS_VARIABLE, "{}")
    with engine() as modules:
        entry.register()
        entry.register()
        config = configuration({SETTINGS_KEY: {}} if how == "key" else {})
        modules[CONFIGURATION].EngineArgs(config).create_engine_config()
    assert calls == ["on"]


def test_entry_switches_off_what_an_engine_before_had_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plugin_double(monkeypatch)
    with engine() as modules:
        entry.register()
        modules[CONFIGURATION].EngineArgs(configuration({})).create_engine_config()
    assert calls == ["off"]


def test_entry_raises_import_error_of_plugin_when_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entry, "PLUGIN", "no_such_module")
    with engine() as modules:
        entry.register()
        args = modules[CONFIGURATION].EngineArgs
        assert args(configuration({})).create_engine_config() is not None
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            args(configuration({SETTINGS_KEY: {}})).create_engine_config()


@pytest.mark.parametrize("how", ["", "variable", "argument"])
def test_entry_without_place_for_hook_raises_if_requested(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "variable":
        monkeypatch.setenv(SETTINGS_VARIABLE, "{}")
    elif how == "argument":
        monkeypatch.setattr(sys, "argv", ["serve", "--additional-config", '{"equipoise": {}}'])
    with engine() as modules:
        del modules[CONFIGURATION].EngineArgs.create_engine_config
        if how:
            with pytest.raises(AttributeError, match="create_engine_config"):
                entry.register()
            return
        with caplog.at_level(logging.WARNING):
            entry.register()
    assert "finds no place in this vLLM, and stays switched off" in caplog.text


def test_worker_hook_initialises_extension_once_after_device() -> None:
    worker, plain = ExtendedWorker(), Worker()
    with engine() as modules:
        entry.register()
        entry.register()
        for one in (worker, plain):
            modules[WORKERS].WorkerWrapperBase(one).init_device()
    assert (worker.devices, worker.inits, plain.devices) == (1, 1, 1)


def test_worker_hook_is_left_out_where_vllm_calls_extension() -> None:
    def init_device(self: Any) -> None:
        self.worker.devices += 1
        getattr(self.worker, "init_worker_extension", lambda: None)()

    worker = ExtendedWorker()
    with engine() as modules:
        modules[WORKERS].WorkerWrapperBase.init_device = init_device
        entry.register()
        assert modules[WORKERS].WorkerWrapperBase.init_device is init_device
        modules[WORKERS].WorkerWrapperBase(worker).init_device()
    assert (worker.devices, worker.inits) == (1, 1)


@pytest.mark.parametrize("before", [SimpleNamespace(**{ORIGINAL_ATTRIBUTE: "theirs"}), "theirs"])
def test_later_engine_without_features_has_stock_policy(before: object) -> None:
    """Ours, of an engine before, knows what it replaced; one that is not ours stays."""
    from equipoise.integrations.vllm import plugin

    policies: dict[str, Any] = {"default": before}
    with engine(vllm__distributed__eplb__policy={"EPLB_POLICIES": policies}) as modules:
        assert plugin.__name__ == entry.PLUGIN
        entry.register()
        modules[CONFIGURATION].EngineArgs(configuration({})).create_engine_config()
    assert policies == {"default": "theirs"}
