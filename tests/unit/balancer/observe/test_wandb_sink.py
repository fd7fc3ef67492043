"""Logging to Weights & Biases, with a fake module `wandb`."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.strategies.engine_events import record, state_changed

from equipoise.balancer.experts.runtime.events import (
    BalanceMeasured,
    BatchBalanceMeasured,
    RebalanceMeasured,
)
from equipoise.balancer.observe.wandb_module import WandbMissing
from equipoise.balancer.observe.wandb_sink import WandbSink


class FakeRun:
    """What `wandb.init` returns."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished = 0

    def log(self, fields: dict[str, Any]) -> None:
        self.logged.append(fields)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake `wandb` module; records the calls of `init`."""
    run = FakeRun()
    fake_module = SimpleNamespace(init_calls=[], run=run)

    def init(**arguments: Any) -> FakeRun:
        fake_module.init_calls.append(arguments)
        return run

    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return fake_module


def test_wandb_run_starts_at_first_log_and_ends_at_close(
    wandb: SimpleNamespace,
) -> None:
    sink = WandbSink("mine", {"ranks": 4})
    sink.emit(state_changed("planning", 3))
    assert wandb.init_calls == []
    sink.emit(RebalanceMeasured(record(actual_imbalance=0.125)))
    sink.emit(
        BalanceMeasured(8, 0.0, imbalance=0.25, balancedness=0.75, mean_rows=3.0, max_rows=4.0)
    )
    sink.emit(BatchBalanceMeasured(4, 0.0, imbalance=0.5, unlevelled_imbalance=0.875))
    sink.close()
    sink.close()
    assert wandb.init_calls == [{"project": "mine", "config": {"ranks": 4}}]
    rebalance, load, batch = wandb.run.logged
    assert rebalance["rebalance/predicted_imbalance"] == 0.1
    assert rebalance["rebalance/actual_imbalance"] == 0.125
    assert load == {"load/step": 8, "load/balancedness": 0.75, "load/imbalance": 0.25}
    assert batch == {"batch/step": 4, "batch/imbalance": 0.5, "batch/unlevelled_imbalance": 0.875}
    assert wandb.run.finished == 1


def test_wandb_run_is_not_started_without_log(wandb: SimpleNamespace) -> None:
    WandbSink("mine", {}).close()
    assert wandb.init_calls == []
    assert wandb.run.finished == 0


def test_wandb_sink_without_wandb_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.balancer.observe.wandb_module.find_spec", lambda name: None)
    with pytest.raises(WandbMissing, match=r"\.\[wandb\]"):
        WandbSink("mine", {})
