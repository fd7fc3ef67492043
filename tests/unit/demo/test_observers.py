"""What passes are told to, as the settings ask."""

import io
import logging
import sys
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from helpers.processes.ports import free_port
from helpers.strategies.engine_events import rebalance_ended
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.runtime.events import EngineClosed
from equipoise.balancer.observe.log_lines import BALANCEDNESS_LOG, REBALANCE_LOG
from equipoise.demo.observers import Observers
from equipoise.demo.settings import RunSettings

CONFIG = BalancerConfig(
    name="exact", shares=ShareMode.EXACT, window_size=2, step_interval=2, sub_window=1
)


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    before = [
        (log, log.level, log.propagate, list(log.handlers))
        for log in (REBALANCE_LOG, BALANCEDNESS_LOG)
    ]
    yield
    for log, level, propagate, handlers in before:
        log.setLevel(level)
        log.propagate, log.handlers = propagate, handlers


def one_rebalance(observers: Observers) -> None:
    with observers.observe(CONFIG) as observation:
        observation.events.emit(rebalance_ended())
        observation.events.emit(EngineClosed())
    assert [rebalance.number for rebalance in observation.spans.rebalances] == [3]


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_observers_log_rebalances_on_first_rank_only(
    rank: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    one_rebalance(Observers(RunSettings(log_rebalances=True), rank))
    log_lines = out.getvalue().splitlines()
    assert len(log_lines) == lines
    assert all("INFO equipoise.rebalances engine=exact rebalance=3" in line for line in log_lines)


def test_observers_write_nothing_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one_rebalance(Observers(RunSettings(), 0))
    assert capsys.readouterr().err == ""
    assert not REBALANCE_LOG.isEnabledFor(logging.INFO)


def test_observers_serve_metrics_on_one_port_per_rank() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    first = free_port(2)
    ranks = [Observers(RunSettings(metrics_port=first), rank) for rank in (0, 1)]
    one_rebalance(ranks[1])
    texts = []
    for rank, observers in enumerate(ranks):
        with urlopen(f"http://127.0.0.1:{first + rank}/metrics", timeout=WATCHDOG) as answer:
            texts.append(answer.read().decode())
        observers.close()
    assert "equipoise_rebalances_total{" not in texts[0]
    assert 'equipoise_rebalances_total{engine="exact"} 1.0' in texts[1]
    assert "_created" not in texts[0]
